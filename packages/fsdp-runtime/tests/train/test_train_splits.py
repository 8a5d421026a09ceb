"""Tensor, pipeline, context and expert parallelism in a run: the curve of one process, whatever the product."""

import dataclasses
import shutil
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from train_helpers import apart, losses, newest, tiny, train, train_and_stop, with_changes

from fsdp_runtime.train import PRESETS, TrainError
from fsdp_runtime.train.parallel.meshes import make_meshes
from fsdp_runtime.train.splits import AXES, SCHEDULES, Splits, find_splits
from ragged_shard.testing import on_ranks, run_ranks

pytestmark = pytest.mark.long

DEEP = dataclasses.replace(PRESETS["tiny"], num_layers=5, tied=False)
MOE = dataclasses.replace(PRESETS["tiny-moe"], num_experts=4)
MODELS = {"dense": PRESETS["tiny"], "deep": DEEP, "moe": MOE}
STEPS = 4


def made(folder, model, **changes):
    given = {"steps": STEPS, "batch": 8, "eval_every": STEPS, "eval_batches": 1, **changes}
    return tiny(folder, model=MODELS[model], **given)


def train_each(runs, out):
    """Runs one after the other on the same ranks; a summary or the message it ended with for each."""
    return {name: train(config, f"{out}/{name}") for name, config in runs.items()}


@pytest.fixture(scope="module")
def curves(folder):
    """Losses and the held-out loss of one process, by model."""
    runs = {name: made(folder, name, system="one") for name in MODELS}
    (found,) = run_ranks(1, train_each, runs, str(folder / "one"))
    return {name: (losses(folder / "one" / name), found[name]["held_out_loss"]) for name in MODELS}


DENSE = {
    "hsdp 2": {"hsdp": 2},
    "tp 2": {"tp": 2},
    "cp 4": {"cp": 4},
    "hsdp 2 x tp 2": {"hsdp": 2, "tp": 2},
    "cp 2 x tp 2": {"cp": 2, "tp": 2},
}
PIPELINES = {
    **{schedule: {"pp": 2, "pp_schedule": schedule, "accumulate": 4} for schedule in SCHEDULES},
    "tp 2 x zbv": {"tp": 2, "pp": 2, "pp_schedule": "zbv", "accumulate": 2},
    "cp 2 x 1f1b": {"cp": 2, "pp": 2, "accumulate": 2, "reshard": False, "checkpointing": True},
}
EXPERTS = {
    "ep 4": {"ep": 4},
    "cp 2 x ep 2": {"cp": 2, "ep": 2},
    "hsdp 2 x ep 2": {"hsdp": 2, "ep": 2, "accumulate": 2},
    "tp 2": {"tp": 2},
    "tp 2 x ep 4": {"tp": 2, "ep": 4},
    "pp 2 x ep 2": {"pp": 2, "ep": 2, "accumulate": 2},
}


@pytest.mark.parametrize(("model", "cases"), [("dense", DENSE), ("deep", PIPELINES), ("moe", EXPERTS)])
def test_a_split_gives_the_curve_of_one_process(folder, curves, model, cases):
    runs = {name: made(folder, model, **changes) for name, changes in cases.items()}
    found = run_ranks(4, train_each, runs, str(folder / model), timeout=300)
    curve, held_out = curves[model]
    for name in cases:
        assert apart(losses(folder / model / name), curve) < 1e-5, name
        assert [rank[name]["held_out_loss"] for rank in found] == pytest.approx([held_out] * 4, rel=1e-5), (
            name
        )


def everything(checkpoint):
    """All tensors of a checkpoint, of the model and the optimizer."""
    reader = FileSystemReader(checkpoint)
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp_load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def resume_each(saved, runs, out):
    """Go on from a copy of one run with other options, in a folder for each of them, on the same ranks."""
    for name, config in runs.items():
        if dist.get_rank() == 0:
            shutil.copytree(saved, f"{out}/{name}")
        dist.barrier()
        assert train(config, f"{out}/{name}")["first_step"] == 2


OPTIMIZERS = {
    "muon": {"tp": 2, "ep": 4},
    "shampoo": {"tp": 2, "pp": 2},
    "soap": {"pp": 2, "ep": 2},
    "adamw8bit": {"cp": 2, "ep": 2},
}


def test_every_optimizer_takes_divided_parameters(folder, tmp_path):
    runs = {
        name: made(folder, "moe", optimizer=name, steps=3, accumulate=2, **changes)
        for name, changes in OPTIMIZERS.items()
    }
    alone = {name: with_changes(run, system="one", **dict.fromkeys(AXES, 1)) for name, run in runs.items()}
    run_ranks(1, train_each, alone, str(tmp_path / "one"))
    run_ranks(4, train_each, runs, str(tmp_path), timeout=300)
    for name in runs:  # SOAP's bases amplify rounding: two numbers of ranks differ as much
        assert apart(losses(tmp_path / name), losses(tmp_path / "one" / name)) < (
            0.01 if name == "soap" else 1e-5
        )


OTHERS: dict[str, dict[str, dict]] = {
    "deep": {
        "pp 2 x cp 2": {"pp": 2, "cp": 2},
        "zbv": {"pp": 2, "pp_schedule": "zbv"},
        "fsdp 4": {},
    },
    "moe": {"fsdp 4": {}, "tp 2 x ep 4": {"tp": 2, "ep": 4}, "pp 2": {"pp": 2}},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("model", "saved"), [("deep", {"hsdp": 2, "tp": 2}), ("moe", {"hsdp": 2, "ep": 2})])
def test_a_run_goes_on_under_other_splits_from_what_the_checkpoint_holds(
    folder, tmp_path, curves, model, saved
):
    config, others = made(folder, model, save_every=1, eval_every=0, accumulate=2, **saved), OTHERS[model]
    run_ranks(4, train_and_stop, config, tmp_path / "saved", 1, 3)
    before = everything(newest(tmp_path / "saved"))
    assert len(before) > 3 * len([name for name in before if name.startswith("model.")])
    plain: dict = {**dict.fromkeys(AXES, 1), "resume": True}
    unchanged: dict[str, dict] = {
        f"{name} saved": {**changes, "steps": 2} for name, changes in others.items()
    }
    runs = {
        name: with_changes(config, **{**plain, **changes}) for name, changes in (others | unchanged).items()
    }
    run_ranks(4, resume_each, str(tmp_path / "saved"), runs, str(tmp_path), timeout=300)
    for name in others:
        assert apart(losses(tmp_path / name), curves[model][0]) < 1e-5, name
        after = everything(newest(tmp_path / f"{name} saved"))
        assert before.keys() == after.keys()
        assert not [key for key in before if not torch.equal(before[key], after[key])], name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, "--tp 3 is 3 ranks, of which there are 4: use --ranks 6"),
        ({"pp": 2, "cp": 4}, "--pp 2 x --cp 4 is 8 ranks, of which there are 4: use --ranks 8"),
        ({"tp": 4}, "--tp 4 does not divide --kv-heads 2"),
        ({"cp": 4, "seq_len": 30}, "--seq-len 30 does not divide by cp 4 x tp 1: use --seq-len 32"),
        ({"ep": 2}, "--ep 2: the model has no experts; use --preset small-moe or --experts N"),
        ({"ep": 2, "model": PRESETS["tiny-moe"]}, "--ep 2 does not divide --experts 5"),
        ({"ep": 3, "model": PRESETS["tiny-moe"]}, "--ep 3 does not divide the 4 ranks that experts lie on"),
        ({"pp": 2}, "--pp 2: embedding and head are one parameter, on two stages; add --no-tied"),
        ({"pp": 4, "model": DEEP, "pp_schedule": "zbv"}, "has 8 stages for 5 layers: add --layers 8"),
        ({"pp": 2, "model": DEEP}, "takes its microbatches from --accumulate 1: expected at least 2"),
        ({"pp": 2, "pp_schedule": "2f2b"}, "--pp-schedule '2f2b': expected one of gpipe, 1f1b"),
        ({"hsdp": 0}, "--hsdp 0: expected at least 1"),
        ({"optimizer": "adan"}, "--optimizer 'adan': expected one of torch-adamw"),
        ({"block": "tile:3"}, "--block 'tile:3': "),
        ({"tp": 2, "system": "fsdp2"}, "--tp 2: only fsdp_runtime has it here, not fsdp2"),
        (
            {"tp": 2, "optimizer": "adamw8bit", "model": PRESETS["small"]},
            "--optimizer adamw8bit with --tp 2: wo is cut by columns",
        ),
        (
            {"tp": 2, "quantize": "fp8", "compute": "scaled"},
            "--compute scaled: not with --tp 2, which cuts the matrices; use dequantize",
        ),
        (
            {"cp": 2, "batch": 7},
            "a global batch of 7 sequences does not divide by 2 readers of fsdp 2 x cp 2 x ",
        ),
    ],
)
def test_what_cannot_be_combined_is_told_before_any_process_starts(folder, changes, message):
    config = tiny(folder, **{"model": PRESETS["tiny"], **changes})
    with pytest.raises(TrainError) as error:
        config.check(4)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (5, {}, "12 sequences does not divide by 5 ranks x 1 microbatches: use --batch 15 or 4 ranks"),
        (5, {"resume": True}, "5 ranks x 1 microbatches: use 4 ranks"),
        (2, {"accumulate": 5, "resume": True}, "2 ranks x 5 microbatches: use another --accumulate"),
        (
            10,
            {"pp": 2, "accumulate": 2, "model": DEEP},
            "5 readers of fsdp 5 x pp 2 x 2 microbatches: use --batch 20 or 6 ranks",
        ),
        (
            15,
            {"hsdp": 3, "accumulate": 2},
            "15 readers of fsdp 5 x hsdp 3 x 2 microbatches: use --batch 30 or 6 ranks",
        ),
    ],
)
def test_what_does_not_divide_a_batch_says_what_would_and_may_be_changed(folder, ranks, changes, message):
    config = tiny(folder, **changes)
    with pytest.raises(TrainError, match=f"{message}$"):
        config.check(ranks)
    if message.endswith("ranks"):
        config.check(int(message.split()[-2]))


def test_every_layer_is_on_one_stage_and_stages_are_on_all_ranks():
    for schedule in SCHEDULES:
        splits = find_splits({**dict.fromkeys(AXES, 1), "pp": 3}, schedule, 6)
        owned = [stage for rank in range(3) for stage in splits.stages_of(rank)]
        assert sorted(owned) == list(range(splits.stages))
        assert [n for stage in range(splits.stages) for n in splits.layers_of(stage, 11)] == list(range(11))
        assert [splits.rank_of_stage(stage) for stage in splits.stages_of(1)] == [1] * len(
            splits.stages_of(1)
        )


def test_experts_lie_on_the_ranks_that_have_the_same_layers():
    splits = Splits(fsdp=4, cp=2, tp=2, pp=3, ep=8)
    assert splits.world_size == 48
    assert splits.shards * splits.tp // splits.ep == 2


@pytest.mark.parametrize(
    ("changes", "rel"),
    [({"quantize": "fp8"}, 1e-6), ({"quantize": "int8", "reduce": "int8"}, 3e-4)],
)
def test_quantized_runs_are_split_too(folder, changes, rel):
    """FP8 makes the same codes; INT8 scales runs of other elements where tp cuts rows."""
    splits = {
        "none": {},
        "tp 2": {"tp": 2},
        "ep 2": {"ep": 2},
        "tp 2 x pp 2": {"tp": 2, "pp": 2, "accumulate": 2},
    }
    runs = {name: made(folder, "moe", **changes, **split) for name, split in splits.items()}
    out = folder / f"quantized-{changes['quantize']}"
    run_ranks(4, train_each, runs, str(out), timeout=300)
    for name in splits:
        assert apart(losses(out / name), losses(out / "none")) < rel, name


@on_ranks(2, timeout=120)
def test_the_groups_of_a_split_have_the_runs_timeout(tmp_path):
    """Rank 1 of a pair never calls; its partner gives up after the run's timeout, not torch's 30 minutes."""
    done = tmp_path / "done"
    meshes = make_meshes(Splits(fsdp=1, tp=2), "cpu", timedelta(seconds=2))
    group = meshes.dense.get_group("tp")
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(4), group=group)
        done.touch()
    while not done.exists():
        time.sleep(0.1)

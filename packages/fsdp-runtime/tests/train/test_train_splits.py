"""Tensor, pipeline, context and expert parallelism in a run: the curve of one process, whatever the product."""

import shutil
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from train_helpers import (
    MODELS,
    apart,
    assert_curve_of_one,
    losses,
    newest,
    tiny,
    train,
    train_and_stop,
    train_each,
    with_changes,
)

from fsdp_runtime.train.parallel.meshes import make_meshes
from fsdp_runtime.train.splits import AXES, SCHEDULES, Splits, find_splits
from ragged_shard.testing import on_ranks, run_ranks

pytestmark = pytest.mark.long

STEPS = 4


def made(folder, model, **changes):
    given = {"steps": STEPS, "batch": 8, "eval_every": STEPS, "eval_batches": 1, **changes}
    return tiny(folder, model=MODELS[model], **given)


@pytest.fixture(scope="module")
def curves(folder):
    """Losses of one process, by model."""
    run_ranks(1, train_each, {name: made(folder, name, system="one") for name in OTHERS}, str(folder / "one"))
    return {name: losses(folder / "one" / name) for name in OTHERS}


DENSE = {
    "hsdp 2": {"hsdp": 2}, "tp 2": {"tp": 2}, "cp 4": {"cp": 4}, "hsdp 2 x tp 2": {"hsdp": 2, "tp": 2},
    "cp 2 x tp 2": {"cp": 2, "tp": 2},
}  # fmt: skip
PIPELINES = {
    **{schedule: {"pp": 2, "pp_schedule": schedule, "accumulate": 4} for schedule in SCHEDULES},
    "tp 2 x pp 2": {"tp": 2, "pp": 2, "accumulate": 2},
    "tp 2 x zbv": {"tp": 2, "pp": 2, "pp_schedule": "zbv", "accumulate": 2},
    "cp 2 x 1f1b": {"cp": 2, "pp": 2, "accumulate": 2, "reshard": False, "checkpointing": True},
}
EXPERTS = {
    "ep 4": {"ep": 4}, "cp 2 x ep 2": {"cp": 2, "ep": 2}, "hsdp 2 x ep 2": {"hsdp": 2, "ep": 2, "accumulate": 2},
    "tp 2 x ep 4": {"tp": 2, "ep": 4}, "pp 2 x ep 2": {"pp": 2, "ep": 2, "accumulate": 2},
    "tp 2": {"tp": 2},
}  # fmt: skip

# Sequences that end with their documents: ranks have different numbers of tokens.
BY_DOCUMENTS = {"documents": True, "end_token": 10}


@pytest.mark.parametrize("ends", [{}, BY_DOCUMENTS], ids=["", "documents"])
@pytest.mark.parametrize(("model", "cases"), [("dense", DENSE), ("deep", PIPELINES), ("moe", EXPERTS)])
def test_a_split_gives_the_curve_of_one_process(folder, tmp_path, model, cases, ends):
    (alone,) = run_ranks(1, train_each, {"one": made(folder, model, system="one", **ends)}, str(tmp_path))
    runs = {name: made(folder, model, **changes, **ends) for name, changes in cases.items()}
    found = run_ranks(4, train_each, runs, str(tmp_path), timeout=300)
    curve, held_out = losses(tmp_path / "one"), alone["one"]["held_out_loss"]
    for name in cases:
        assert_curve_of_one(tmp_path / name, [rank[name] for rank in found], curve, held_out)


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
    "deep": {"pp 2 x cp 2": {"pp": 2, "cp": 2}, "zbv": {"pp": 2, "pp_schedule": "zbv"}, "fsdp 4": {}},
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
        assert apart(losses(tmp_path / name), curves[model]) < 1e-5, name
        after = everything(newest(tmp_path / f"{name} saved"))
        assert before.keys() == after.keys()
        assert not [key for key in before if not torch.equal(before[key], after[key])], name


def test_every_layer_is_on_one_stage_and_stages_are_on_all_ranks():
    for schedule in SCHEDULES:
        splits = find_splits({**dict.fromkeys(AXES, 1), "pp": 3}, schedule, 6)
        owned = [stage for rank in range(3) for stage in splits.stages_of(rank)]
        assert sorted(owned) == list(range(splits.stages))
        assert [n for stage in range(splits.stages) for n in splits.layers_of(stage, 11)] == list(range(11))
        assert {splits.rank_of_stage(stage) for stage in splits.stages_of(1)} == {1}


@pytest.mark.parametrize(
    ("changes", "rel"), [({"quantize": "fp8"}, 1e-6), ({"quantize": "int8", "reduce": "int8"}, 3e-4)]
)
def test_quantized_runs_are_split_too(folder, changes, rel):
    """FP8 makes the same codes; INT8 scales runs of other elements where tp cuts rows."""
    both = PIPELINES["tp 2 x pp 2"]
    splits: dict[str, Any] = {"none": {}, "tp 2": {"tp": 2}, "ep 2": {"ep": 2}, "tp 2 x pp 2": both}
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

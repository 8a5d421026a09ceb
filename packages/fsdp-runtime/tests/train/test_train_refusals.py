"""Options that cannot be, or not together, are refused before any process starts."""

from typing import Any

import pytest
from train_helpers import MODELS, tiny

from fsdp_runtime.train import PRESETS, TrainError

BUDGET = {"memory_budget": 1 << 30}
DOCUMENTS: dict[str, Any] = {"documents": True, "end_token": 10}
ON_FOUR: list[tuple[dict[str, Any], str]] = [
    ({"tp": 3}, "--tp 3 is 3 ranks, of which there are 4: use --ranks 6"),
    ({"pp": 2, "cp": 4}, "--pp 2 x --cp 4 is 8 ranks, of which there are 4: use --ranks 8"),
    ({"tp": 4}, "--tp 4 does not divide --kv-heads 2"),
    ({"cp": 4, "seq_len": 30}, "--seq-len 30 does not divide by cp 4 x tp 1: use --seq-len 32"),
    ({"ep": 2}, "--ep 2: the model has no experts; use --preset small-moe or --experts N"),
    ({"ep": 2, "model": PRESETS["tiny-moe"]}, "--ep 2 does not divide --experts 5"),
    ({"ep": 3, "model": PRESETS["tiny-moe"]}, "--ep 3 does not divide the 4 ranks that experts lie on"),
    ({"pp": 2}, "--pp 2: embedding and head are one parameter, on two stages; add --no-tied"),
    ({"pp": 4, "model": MODELS["deep"], "pp_schedule": "zbv"}, "has 8 stages for 5 layers: add --layers 8"),
    ({"pp": 2, "model": MODELS["deep"]}, "takes its microbatches from --accumulate 1: expected at least 2"),
    ({"pp": 2, "pp_schedule": "2f2b"}, "--pp-schedule '2f2b': expected one of gpipe, 1f1b"),
    ({"hsdp": 0}, "--hsdp 0: expected at least 1"),
    ({"optimizer": "adan"}, "--optimizer 'adan': expected one of torch-adamw"),
    ({"block": "tile:3"}, "--block 'tile:3': "),
    ({"tp": 2, "system": "fsdp2"}, "--tp 2: only fsdp_runtime has it, not fsdp2"),
    ({"block": "rows:4", "system": "ddp"}, "--block rows:4: only fsdp_runtime has it, not ddp"),
    ({"on_nan": "wait"}, "--on-nan 'wait': expected one of stop, skip"),
    (
        {"tp": 2, "optimizer": "adamw8bit", "model": PRESETS["small"]},
        "--optimizer adamw8bit with --tp 2: wo is cut by columns",
    ),
    (
        {"tp": 2, "quantize": "fp8", "compute": "scaled"},
        "--compute scaled: not with --tp 2, which cuts the matrices; use dequantize",
    ),
    ({"cp": 2, "batch": 7}, "a global batch of 7 sequences does not divide by 2 readers of fsdp 2 x cp 2 x "),
]
ON_TWO: list[tuple[dict[str, Any], str]] = [
    ({**BUDGET, "system": "fsdp2"}, "only fsdp_runtime has it"),
    ({**BUDGET, "reshard": False}, "it decides what --no-reshard does"),
    ({**BUDGET, "pp": 2, "accumulate": 2}, "not with --pp 2"),
    ({"offload": ("weights",)}, "weights: expected activations, gradients, states"),
    ({"offload": ("states",), "system": "fsdp2"}, "only fsdp_runtime has it"),
    ({"offload": ("gradients",)}, "add states"),
    ({"offload": ("activations", "states")}, "the device is the CPU"),
    ({"quantize": "fp4"}, "expected one of none, fp8, mxfp8, nvfp4, int8"),
    ({"reduce": "fp8"}, "expected one of none, bf16, int8"),
    ({"compute": "scaled"}, "--compute scaled multiplies codes of --quantize fp8 or mxfp8, not of none"),
    ({"quantize": "fp8", "system": "fsdp2"}, "only fsdp_runtime has it, not fsdp2"),
    ({**DOCUMENTS, "system": "fsdp2"}, "--documents: fsdp2 averages the means of ranks"),
    ({**DOCUMENTS, "documents": False}, "--end-token 10: only --documents ends sequences there"),
    (
        {"system": "fsdp2_float8", "save_every": 2},
        "fsdp2_float8 is here for comparison and saves no checkpoints",
    ),
    ({"log_to": ("wandb", "mlflow")}, "--log-to mlflow: expected tensorboard, wandb, trackio"),
    ({"memory_snapshot": 2}, "--memory-snapshot 2: torch records no allocations of cpu devices"),
    *(
        ({"profile": p}, f"--profile {p}: expected START:STOP")
        for p in ("3", "3:", "3:3", "4:3", "-1:3", "a:b")
    ),
    ({"profile": "7:9", "steps": 8}, "--profile 7:9: the last step of --steps 8 is 7"),
]


@pytest.mark.parametrize(
    ("ranks", "changes", "message"), [*((4, *row) for row in ON_FOUR), *((2, *row) for row in ON_TWO)]
)
def test_what_cannot_be_is_told_before_any_process_starts(tmp_path, ranks, changes, message):
    with pytest.raises(TrainError) as error:
        tiny(tmp_path, **changes).check(ranks)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (5, {}, "12 sequences does not divide by 5 ranks x 1 microbatches: use --batch 15 or 4 ranks"),
        (5, {"resume": True}, "5 ranks x 1 microbatches: use 4 ranks"),
        (2, {"accumulate": 5, "resume": True}, "2 ranks x 5 microbatches: use another --accumulate"),
        (
            10,
            {"pp": 2, "accumulate": 2, "model": MODELS["deep"]},
            "5 readers of fsdp 5 x pp 2 x 2 microbatches: use --batch 20 or 6 ranks",
        ),
        (
            15,
            {"hsdp": 3, "accumulate": 2},
            "15 readers of fsdp 5 x hsdp 3 x 2 microbatches: use --batch 30 or 6 ranks",
        ),
    ],
)
def test_what_does_not_divide_a_batch_says_what_would_and_may_be_changed(tmp_path, ranks, changes, message):
    config = tiny(tmp_path, **changes)
    with pytest.raises(TrainError, match=f"{message}$"):
        config.check(ranks)
    if message.endswith("ranks"):
        config.check(int(message.split()[-2]))

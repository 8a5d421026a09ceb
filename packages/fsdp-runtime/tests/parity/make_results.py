"""Writes RESULTS.md: how far this runtime and FSDP2 end from one process, every model at every world size."""

import platform
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from parity_matrix import MODELS, runs_of
from parity_runs import STEPS, Report, Run, compare_all

from ragged_shard.testing import run_ranks

RESULTS = Path(__file__).parent / "RESULTS.md"
KINDS = (
    ("fp32, SGD", lambda run: not run.low and run.optimizer == "sgd"),
    ("fp32, AdamW", lambda run: not run.low and run.optimizer == "adamw"),
    ("bf16, SGD", lambda run: run.low and run.optimizer == "sgd"),
    ("bf16, AdamW", lambda run: run.low and run.optimizer == "adamw"),
)


def row(model: str, ranks: int, kind: str, found: list[Report]) -> str:
    def worst(values: Iterable[float]) -> str:
        return f"{max(values):.0e}"

    cells = (
        model,
        str(ranks),
        kind,
        f"{worst(r.losses for r in found)} / {worst(r.fsdp2_losses for r in found)}",
        f"{worst(r.parameters for r in found)} / {worst(r.fsdp2_parameters for r in found)}",
        f"{worst(r.between_losses for r in found)}, {worst(r.between_parameters for r in found)}",
        f"{sum(r.same_bits for r in found)} of {len(found)}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    done: list[tuple[str, int, list[Run], list[Report]]] = []
    for ranks in (1, 2, 3, 4):
        for model in MODELS:
            if runs := runs_of(model, ranks):
                done.append((model, ranks, runs, run_ranks(ranks, compare_all, runs, timeout=1800)[0]))
                print(f"{model}, {ranks} ranks: {len(runs)} runs", flush=True)
    total = sum(len(runs) for _, _, runs, _ in done)
    lines = [
        f"# {total} runs of {STEPS} steps, three ways",
        "",
        "This runtime and FSDP2 in one process group of gloo ranks, and plain training on all rows in one process.",
        "",
        "Each cell has the worst over the features of its row (`reshard_after_forward`, microbatches with and without",
        "sync, offload, both kinds of checkpointing; HSDP on 4 ranks), with block policies dealt over them. Losses are",
        "relative, parameters to a tensor's largest value. bf16 is beside fp32 parameters computed with as bf16.",
        "",
        "Made by `python packages/fsdp-runtime/tests/parity/make_results.py`; "
        f"torch {torch.__version__}, {platform.machine()}.",
        "",
        "| model | ranks | | losses from one process: here / FSDP2 | parameters: here / FSDP2 "
        "| here from FSDP2: losses, parameters | FSDP2's bits |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, ranks, runs, reports in done:
        for kind, fits in KINDS:
            if found := [report for run, report in zip(runs, reports, strict=True) if fits(run)]:
                lines.append(row(model, ranks, kind, found))
    few = [report for _, ranks, _, reports in done if ranks <= 2 for report in reports]
    lines += [
        "",
        f"On 1 and 2 ranks {sum(report.same_bits for report in few)} of {len(few)} runs have FSDP2's losses and "
        "parameters to the bit, whatever the block policy: a sum of two does not depend on order. On more ranks gloo "
        "adds in an order that depends on where an element lies in the buffer, so that layouts differ in last bits.",
    ]
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

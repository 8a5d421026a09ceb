"""Writes packages/fsdp-runtime/docs/PARITY.md: how far this runtime and FSDP2 end from one process."""

import platform
from collections.abc import Iterable

import torch
from parity_matrix import MODELS, runs_of
from parity_runs import STEPS, Report, Run, compare_all

from checks import RUNTIME
from ragged_shard.testing import run_ranks

PAGE = RUNTIME / "docs" / "PARITY.md"
KINDS = (
    ("fp32, SGD", lambda run: not run.low and run.optimizer == "sgd"),
    ("fp32, AdamW", lambda run: not run.low and run.optimizer == "adamw"),
    ("bf16, SGD", lambda run: run.low and run.optimizer == "sgd"),
    ("bf16, AdamW", lambda run: run.low and run.optimizer == "adamw"),
)


def row(ranks: int, kind: str, reports: list[Report]) -> str:
    def worst(values: Iterable[float]) -> str:
        return f"{max(values):.0e}"

    def both(ours: str, fsdp2: str) -> str:
        return ours if ours == fsdp2 else f"{ours} (FSDP2 {fsdp2})"

    cells = (
        str(ranks), kind, both(worst(r.losses for r in reports), worst(r.fsdp2_losses for r in reports)),
        both(worst(r.parameters for r in reports), worst(r.fsdp2_parameters for r in reports)),
        worst(r.between_losses for r in reports), worst(r.between_parameters for r in reports),
        f"{sum(r.same_bits for r in reports)} of {len(reports)}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def page(done: list[tuple[int, Run, Report]]) -> str:
    """The whole page, from the number of ranks, the run and its report of each run."""
    lines = [
        f"# {len(done)} runs of {STEPS} steps, three ways",
        "",
        "This runtime, FSDP2 on the same gloo ranks, and plain training on all rows in one process, of a dense model",
        "and four mixtures of experts. A row has the worst over models and features: `reshard_after_forward`,",
        "microbatches with and without sync, offload, both kinds of checkpointing, block policies; HSDP on 4 ranks.",
        "",
        "Distances from one process, which are FSDP2's too unless it says so, then ours from FSDP2. Losses are",
        "relative, parameters to a tensor's largest value. bf16 is compute in bf16 with fp32 parameters.",
        "",
        f"Made by `python -m checks.parity`; torch {torch.__version__}, {platform.machine()}.",
        "",
        "| ranks | runs | losses | parameters | losses from FSDP2 | parameters from FSDP2 | equal bits |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for ranks in dict.fromkeys(ranks for ranks, _, _ in done):
        for kind, fits in KINDS:
            if reports := [report for count, run, report in done if count == ranks and fits(run)]:
                lines.append(row(ranks, kind, reports))
    lines += [
        "",
        "On more than two ranks gloo adds in an order that depends on where an element is in the buffer, so layouts",
        "differ in last bits.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    done: list[tuple[int, Run, Report]] = []
    for ranks in (1, 2, 3, 4):
        for model in MODELS:
            if runs := runs_of(model, ranks):
                reports = run_ranks(ranks, compare_all, runs, timeout=1800)[0]
                done += [(ranks, run, report) for run, report in zip(runs, reports, strict=True)]
                print(f"{model}, {ranks} ranks: {len(runs)} runs", flush=True)
    PAGE.write_text(page(done))


if __name__ == "__main__":
    main()

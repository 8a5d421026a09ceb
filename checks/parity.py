"""Writes a table into docs/numerics.md: how far this runtime and FSDP2 end from one process."""

from collections.abc import Iterable

from parity_matrix import MODELS, runs_of
from parity_runs import STEPS, Report, Run, compare_all

from checks import RUNTIME
from checks.page import write_section
from ragged_shard.testing import run_ranks

PAGE = RUNTIME / "docs" / "numerics.md"
KINDS = (
    ("fp32, SGD", lambda run: not run.low and run.optimizer == "sgd"),
    ("fp32, AdamW", lambda run: not run.low and run.optimizer == "adamw"),
    ("bf16, SGD", lambda run: run.low and run.optimizer == "sgd"),
    ("bf16, AdamW", lambda run: run.low and run.optimizer == "adamw"),
)


def row(kind: str, done: list[tuple[int, Report]]) -> str:
    """A row of the table, from the number of ranks and the report of each run of a kind."""
    reports = [report for _, report in done]
    few = [report for ranks, report in done if ranks <= 2]
    many = [report for ranks, report in done if ranks > 2]

    def worst(values: Iterable[float]) -> str:
        return f"{max(values):.0e}"

    def both(ours: str, fsdp2: str) -> str:
        return ours if ours == fsdp2 else f"{ours} (FSDP2 {fsdp2})"

    cells = (
        kind, both(worst(r.losses for r in reports), worst(r.fsdp2_losses for r in reports)),
        both(worst(r.parameters for r in reports), worst(r.fsdp2_parameters for r in reports)),
        worst(r.between_losses for r in reports), worst(r.between_parameters for r in reports),
        *(f"{sum(r.same_bits for r in some)} of {len(some)}" for some in (few, many)),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(done: list[tuple[int, Run, Report]]) -> str:
    """The table, from the number of ranks, the run and its report of each run."""
    lines = [
        f"{len(done)} runs of {STEPS} steps on 1 to 4 ranks; the last columns count runs with equal bits.",
        "",
        "| runs | losses | parameters | losses from FSDP2 | parameters from FSDP2 | equal: 1-2 ranks | 3-4 ranks |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, fits in KINDS:
        lines.append(row(kind, [(ranks, report) for ranks, run, report in done if fits(run)]))
    return "\n".join(lines)


def main() -> None:
    done: list[tuple[int, Run, Report]] = []
    for ranks in (1, 2, 3, 4):
        for model in MODELS:
            if runs := runs_of(model, ranks):
                reports = run_ranks(ranks, compare_all, runs, timeout=1800)[0]
                done += [(ranks, run, report) for run, report in zip(runs, reports, strict=True)]
                print(f"{model}, {ranks} ranks: {len(runs)} runs", flush=True)
    write_section("parity", table(done), PAGE)


if __name__ == "__main__":
    main()

"""Writes a table into docs/parallelism.md: each case with this runtime and FSDP2, in turns on the same ranks."""

from harness import RANKS, Case, Outcome, all_cases, run_case, worst_of

from checks import RUNTIME
from checks.page import write_section
from ragged_shard.testing import RankError, run_ranks

PAGE = RUNTIME / "docs" / "parallelism.md"
BOUND = 1e-4  # FSDP2 is wrong beyond it; the tests hold ours to less


def both(name: str, ask_fsdp2: bool) -> tuple[Outcome | str, Outcome | str | None]:
    return run_case(name, "ours"), run_case(name, "fsdp2") if ask_fsdp2 else None


def outcomes_of(entry: Case) -> tuple[Outcome | str, Outcome | str]:
    """The outcomes of a case with ours and with FSDP2."""
    try:
        ranks = run_ranks(RANKS, both, entry.name, not entry.only_ours, timeout=300)
    except RankError as error:
        raise SystemExit(f"{entry.name}: {error}") from error
    ours = worst_of([outcome for outcome, _ in ranks])
    theirs = [outcome for _, outcome in ranks if outcome is not None]
    return ours, worst_of(theirs) if theirs else entry.only_ours


def differences(outcomes: list[Outcome | str]) -> str:
    """Where FSDP2 differs from one process in a section: errors by their class, the largest distances."""
    counts: dict[str, int] = {}
    distances: dict[str, float] = {}
    for outcome in outcomes:
        if isinstance(outcome, str):
            reasons = [outcome.replace("|", "/")[:160]]
        else:
            values = {"loss": outcome.loss, "gradients": outcome.gradients, "norm": outcome.norm}
            raised = {name: value for name, value in values.items() if isinstance(value, str)}
            reasons = [f"no {name}: `{value.partition(':')[0]}`" for name, value in raised.items()]
            for name, value in values.items():
                if isinstance(value, float) and not value <= BOUND:
                    reason = f"**wrong {name}**"
                    distances[reason] = max(value, distances.get(reason, 0.0))
                    reasons.append(reason)
        for reason in reasons:
            counts[reason] = counts.get(reason, 0) + 1
    return "; ".join(
        f"{count}: {reason}" + (f", {distances[reason]:.0e}" if reason in distances else "")
        for reason, count in counts.items()
    )


def table(results: list[tuple[str, Outcome | str]]) -> str:
    """A row for each section, from the section and FSDP2's outcome of each case."""
    lines = ["| cases | | FSDP2 |", "| --- | ---: | --- |"]
    for section in dict.fromkeys(section for section, _ in results):
        outcomes = [outcome for other, outcome in results if other == section]
        lines.append(f"| {section} | {len(outcomes)} | {differences(outcomes)} |")
    return "\n".join(lines)


def main() -> None:
    results = []
    for entry in all_cases().values():
        ours, theirs = outcomes_of(entry)
        print(f"{entry.name}: {ours} / {theirs}", flush=True)
        if isinstance(ours, str):
            raise SystemExit(f"{entry.name}: {ours}")
        results.append((entry.section, theirs))
    write_section("parallel", table(results), PAGE)


if __name__ == "__main__":
    main()

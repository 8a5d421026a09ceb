"""Writes packages/fsdp-runtime/docs/PARALLEL.md: each case with this runtime and FSDP2, in turns on the same ranks."""

import platform

import torch
from harness import KINDS, RANKS, Case, Outcome, all_cases, run_case, worst_of

from checks import RUNTIME
from ragged_shard.testing import RankError, run_ranks

PAGE = RUNTIME / "docs" / "PARALLEL.md"
BOUND = 1e-4  # FSDP2 is wrong beyond it; the tests hold ours to less
HEAD = ["| case | FSDP2 | collectives | bytes sent |", "| --- | --- | --- | --- |"]


def both(name: str, ask_fsdp2: bool) -> tuple[Outcome | str, Outcome | str | None]:
    return run_case(name, "ours"), run_case(name, "fsdp2") if ask_fsdp2 else None


def outcomes_of(entry: Case) -> tuple[Outcome | str, Outcome | str]:
    """What a case gives with ours and with FSDP2."""
    try:
        ranks = run_ranks(RANKS, both, entry.name, not entry.only_ours, timeout=300)
    except RankError as error:
        raise SystemExit(f"{entry.name}: {error}") from error
    ours = worst_of([outcome for outcome, _ in ranks])
    theirs = [outcome for _, outcome in ranks if outcome is not None]
    return ours, worst_of(theirs) if theirs else entry.only_ours


def row(text: str, ours: Outcome, theirs: Outcome | str) -> str:
    """A case's row; FSDP2's counts and bytes are in it where they differ from ours."""
    if isinstance(theirs, str):
        cells = [theirs.replace("|", "/")[:160], _counts(ours), _bytes(ours)]
    else:
        cells = [_wrong(theirs), _both(_counts(ours), _counts(theirs)), _both(_bytes(ours), _bytes(theirs))]
    return f"| {text} | {' | '.join(cells)} |"


def _both(ours: str, theirs: str) -> str:
    return ours if ours == theirs else f"{ours} ({theirs})"


def _counts(outcome: Outcome) -> str:
    return "/".join(str((outcome.counts or {}).get(kind, 0)) for kind in KINDS)


def _bytes(outcome: Outcome) -> str:
    return f"{outcome.bytes_sent:,.0f}"


def _wrong(outcome: Outcome) -> str:
    """What of FSDP2's is not one process's: errors by their class, distances above the bound."""
    distances = {"loss": outcome.loss, "gradients": outcome.gradients, "norm": outcome.norm}
    parts = []
    for name, value in distances.items():
        if isinstance(value, str):
            parts.append(f"no {name}: `{value.partition(':')[0]}`")
        elif value is not None and not value <= BOUND:
            parts.append(f"**wrong {name}**: {value:.0e}")
    return ", ".join(parts)


def largest(outcomes: list[Outcome]) -> float:
    values = [value for o in outcomes for value in (o.loss, o.gradients, o.norm) if isinstance(value, float)]
    return max(values)


def page(results: list[tuple[str, str, Outcome, Outcome | str]]) -> str:
    """The whole page, of the section, the text, our outcome and FSDP2's of each case."""
    lines = [
        "# With tensor, expert, pipeline and context parallelism, case by case",
        "",
        f"Each case trains on {RANKS} gloo ranks with this runtime and with FSDP2; only the import differs. Loss,",
        "gradients and clipped norm of ours are within "
        f"{largest([ours for _, _, ours, _ in results]):.0e} of one process, relative; a test",
        "holds them to 1e-5, and to the exact number of collectives. The column FSDP2 has what raises or is further",
        f"away than {BOUND:.0e}; if clipping raises, the case continues without it.",
        "",
        "Collectives of a step on rank 0: gathers/reduce-scatters/all-reduces/all-to-alls; FSDP2's are in parentheses",
        "if they differ. [Parallelism](parallelism.md) says how to use each. Made by",
        f"`python -m checks.parallel`; torch {torch.__version__}, {platform.machine()}.",
    ]
    section, reason = "", ""
    for title, text, ours, theirs in results:
        if title != section:
            section = title
            lines += ["", f"## {section}", "", *HEAD]
        repeated = isinstance(theirs, str) and theirs == reason
        lines.append(row(text, ours, "as above" if repeated else theirs))
        reason = theirs if isinstance(theirs, str) else ""
    return "\n".join(lines) + "\n"


def main() -> None:
    results = []
    for entry in all_cases().values():
        ours, theirs = outcomes_of(entry)
        print(f"{entry.name}: {ours} / {theirs}", flush=True)
        if isinstance(ours, str):
            raise SystemExit(f"{entry.name}: {ours}")
        results.append((entry.section, entry.text, ours, theirs))
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()

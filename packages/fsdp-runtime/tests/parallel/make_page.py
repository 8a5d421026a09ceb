"""Writes packages/fsdp-runtime/docs/PARALLEL.md: each case with this runtime and FSDP2, in turns on the same ranks."""

import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from harness import RANKS, Case, Outcome, all_cases, run_case, worst_of

from ragged_shard.testing import RankError, run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "PARALLEL.md"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
HEAD = "| case | | loss | gradients | clip norm | collectives | bytes sent |"


def both(name: str, ask_fsdp2: bool) -> tuple[Outcome | str, Outcome | str | None]:
    """On a rank: ours, then FSDP2."""
    return run_case(name, "ours"), run_case(name, "fsdp2") if ask_fsdp2 else None


def found_of(entry: Case) -> tuple[Outcome | str, Outcome | str]:
    """What a case gives with ours and with FSDP2."""
    try:
        ranks = run_ranks(RANKS, both, entry.name, not entry.only_ours, timeout=300)
    except RankError as error:
        raise SystemExit(f"{entry.name}: {error}") from error
    ours = worst_of([one for one, _ in ranks])
    theirs = [other for _, other in ranks if other is not None]
    return ours, worst_of(theirs) if theirs else entry.only_ours


def cells(found: Outcome | str) -> list[str]:
    """One implementation's five cells; of an error or a reason one."""
    if isinstance(found, str):
        return [found.replace("|", "/")[:160]]
    norm = "not clipped" if found.norm is None else _distance(found.norm)
    counts = "/".join(str((found.counts or {}).get(kind, 0)) for kind in KINDS)
    return [
        _distance(found.loss),
        _distance(found.gradients),
        norm,
        counts,
        f"{found.bytes_sent:,.0f}",
    ]


def _distance(value: float | str) -> str:
    if isinstance(value, str):
        return value.partition(":")[0]  # the class of the error
    return f"**{value:.0e}**" if not value <= 1e-4 else f"{value:.0e}"


def main() -> None:
    lines = [
        "# With tensor, expert, pipeline and context parallelism, case by case",
        "",
        f"Each case trains on {RANKS} gloo ranks with this runtime and with FSDP2, in turns in the same process group; "
        "the import is the only difference.",
        "Loss, gradients (after clipping) and the norm are distances from one plain process, relative; what is further "
        "than 1e-4 is bold.",
        "Each case is also a test (`tests/parallel`), which holds ours to 1e-5 and to the exact number of collectives.",
        "Both clip with `torch.nn.utils.clip_grad_norm_`, unless the case says otherwise; where that raises, the case "
        "goes on without clipping.",
        "Trainers that use FSDP2 on several meshes compute the norm of each mesh by themselves and join them.",
        "",
        "Collectives of a step, rank 0: gathers/reduce-scatters/all-reduces/all-to-alls; bytes that it sends. A reason "
        "without figures holds for the next cases of ours, too. Made by "
        f"`python packages/fsdp-runtime/tests/parallel/make_page.py`; torch {torch.__version__}, {platform.machine()}.",
    ]
    section, reason = "", ""
    for entry in all_cases().values():
        if entry.section != section:
            section = entry.section
            lines += ["", f"## {section}", "", HEAD, "| --- | --- | --- | --- | --- | --- | --- |"]
        ours, theirs = found_of(entry)
        print(f"{entry.name}: {ours} / {theirs}", flush=True)
        lines.append(f"| {entry.text} | ours | {' | '.join(cells(ours))} |")
        if not entry.only_ours or entry.only_ours != reason:
            lines.append(f"|  | FSDP2 | {' | '.join(cells(theirs))} |")
        reason = entry.only_ours or reason
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

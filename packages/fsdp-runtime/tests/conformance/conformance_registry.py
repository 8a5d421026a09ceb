"""Cases, what each implementation does with them, and the table that is made from both.

A case is a function of the implementation's namespace, run on real ranks:

    @case("Wrapping", "a mesh of three dimensions is refused", fsdp2=Raises(ValueError, "1D or 2D"))
    def three_dimensions(fsdp):
        fsdp.fully_shard(MLP(), mesh=mesh(1, 2, 1))

It passes when each implementation does what its entry says: works, or raises that error on every rank. What the
table says follows from the two entries, so that it cannot say what was not seen.
"""

import importlib
import inspect
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

TORCHS = ("2.13", "2.15")  # whose FSDP2 the cases are run with
TORCH_NOW = tuple(map(int, torch.__version__.split(".")[:2]))
IMPLEMENTATIONS = {"fsdp2": "torch.distributed.fsdp", "ours": "fsdp_runtime"}
MODULES = (
    "conformance_wrapping", "conformance_parameters", "conformance_units", "conformance_forward",
    "conformance_gradients", "conformance_precision", "conformance_extensions",
    "conformance_state", "conformance_composition", "conformance_failure",
)  # fmt: skip


@dataclass(frozen=True)
class Raises:
    """The case ends with this error on every rank, and its message matches."""

    error: type[BaseException] | tuple[type[BaseException], ...]
    match: str


@dataclass(frozen=True)
class Wrong(Raises):
    """The case's own assertion fails, with this message: no error, but wrong values."""

    error: type[BaseException] = AssertionError
    match: str = ""


@dataclass(frozen=True)
class Case:
    """One behavior.

    Attributes:
        ranks: a world size for each launch; a later one finds what an earlier one left on disk.
        better: why this implementation is better where both work.
        unsupported: FSDP2 supports it elsewhere than on gloo.
        since: the torch that this implementation needs for it.
        new: FSDP2 has it from this torch on.
        fixed: from this torch on FSDP2 does as this implementation.
        refusal: its error leaves nothing half done, so that others can follow on the same ranks.
    """

    name: str
    section: str
    text: str
    fn: Callable[..., None]
    ranks: tuple[int, ...]
    fsdp2: Raises | None
    ours: Raises | None
    better: str = ""
    note: str = ""
    unsupported: bool = False
    since: tuple[int, int] = (2, 11)
    new: tuple[int, int] = (2, 11)
    fixed: tuple[int, int] | None = None
    timeout: float = 60.0
    refusal: bool = False

    @property
    def verdict(self) -> str:
        """What the table says of this implementation beside FSDP2."""
        if self.better or (self.fsdp2 is not None and self.ours is None):
            return "better"
        if self.unsupported or (self.ours is not None and self.fsdp2 is None):
            return "not supported"
        return "equal"

    def expected(self, implementation: str) -> Raises | None:
        as_ours = implementation == "ours" or (self.fixed is not None and self.fixed <= TORCH_NOW)
        return self.ours if as_ours else self.fsdp2

    def needs(self, implementation: str) -> tuple[int, int]:
        """The torch that an implementation needs for it."""
        return max(self.since, self.new) if implementation == "fsdp2" else self.since


CASES: dict[str, Case] = {}


def case(section, text, *, ranks=2, fsdp2=None, ours="same", **options):
    """Enter a case, with options of `Case`. ``ours`` is what FSDP2 does unless it says else."""

    def enter(fn: Callable[..., None]) -> Callable[..., None]:
        name, theirs = fn.__name__, fsdp2 if isinstance(ours, str) else ours
        assert name not in CASES, f"two cases called {name}"
        sizes = (ranks,) if isinstance(ranks, int) else ranks
        CASES[name] = Case(name, section, text, fn, sizes, fsdp2, theirs, **options)
        return fn

    return enter


def refusal(
    section: str, text: str, attempt: Callable[[Any], Any], *raised: Raises | None, **options: Any
) -> None:
    """Enter a case whose error, of FSDP2 and of ours if that differs, leaves nothing half done."""

    def refused(fsdp: Any) -> None:
        attempt(fsdp)

    refused.__name__ = text
    case(section, text, fsdp2=raised[0], ours=raised[-1], refusal=True, **options)(refused)


def all_cases() -> dict[str, Case]:
    for module in MODULES:
        importlib.import_module(module)
    return CASES


def run_refusals(implementation: str) -> list[str]:
    """On a rank: what is not as it must be, of all refusals that this torch has."""
    problems = []
    for name, entry in all_cases().items():
        if entry.refusal and entry.needs(implementation) <= TORCH_NOW:
            try:
                run_case(name, implementation, "")
            except Exception as error:
                problems.append(f"{name}: {error}")
    dist.barrier()
    return problems


def run_case(name: str, implementation: str, folder: str) -> tuple[str, str, str] | None:
    """On a rank: None if the case works, else the error's type, message and traceback. An expected error is checked."""
    entry = all_cases()[name]
    fsdp = importlib.import_module(IMPLEMENTATIONS[implementation])
    arguments: list[Any] = [folder] if "folder" in inspect.signature(entry.fn).parameters else []
    expected = entry.expected(implementation)
    try:
        entry.fn(fsdp, *arguments)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        if expected is None:
            raise
        if not isinstance(error, expected.error) or not re.search(expected.match, str(error)):
            raise AssertionError(f"expected {expected}, got {type(error).__name__}: {error}") from error
        if not entry.refusal:
            dist.destroy_process_group()  # what it left half done must not meet the next case
        return type(error).__name__, str(error), trace
    if expected is not None:
        raise AssertionError(f"{name} works with {IMPLEMENTATIONS[implementation]}; expected {expected}")
    return None


def table() -> str:
    cases = all_cases().values()
    counts = {
        verdict: sum(c.verdict == verdict for c in cases) for verdict in ("equal", "better", "not supported")
    }
    lines = [
        "# FSDP2 and fsdp_runtime, behavior by behavior",
        "",
        "Each line is one case of `tests/conformance`, run on real gloo ranks with both implementations, which differ",
        f"in the import alone; FSDP2 is that of torch {' and '.join(TORCHS)}. Made by `python -m checks.conformance`;",
        "a test keeps it up to date.",
        "",
        f"{len(CASES)} behaviors: {counts['equal']} equal, {counts['better']} better, "
        f"{counts['not supported']} not supported. Lines without a verdict are equal.",
    ]
    section = ""
    for entry in cases:
        if entry.section != section:
            section = entry.section
            lines += ["", f"## {section}", ""]
        verdict = "" if entry.verdict == "equal" else f"**{entry.verdict}**: "
        remark = _remark(entry)
        lines.append(f"* {verdict}{entry.text}" + (f" ({remark})" if remark else ""))
    return "\n".join(lines) + "\n"


def _remark(entry: Case) -> str:
    parts = []
    if entry.fsdp2 is not None and entry.ours is None:
        parts.append(
            "not so in FSDP2" if isinstance(entry.fsdp2, Wrong) else f"FSDP2 raises {_name(entry.fsdp2)}"
        )
    elif entry.ours is not None and (entry.fsdp2 is None or isinstance(entry.fsdp2, Wrong)):
        parts.append(f"raises {_name(entry.ours)}")
    elif entry.ours is not None and entry.fsdp2 is not None:
        one, other = _name(entry.fsdp2), _name(entry.ours)
        parts.append(other if one == other else f"{other}, FSDP2 {one}")
    if entry.new > (2, 11):
        parts.append("FSDP2 from torch {}.{} on".format(*entry.new))
    if entry.fixed is not None:
        parts.append("FSDP2 does so from torch {}.{} on".format(*entry.fixed))
    parts += [text for text in (entry.better, entry.note) if text]
    return "; ".join(parts)


def _name(expected: Raises) -> str:
    errors = expected.error if isinstance(expected.error, tuple) else (expected.error,)
    return " or ".join(f"`{error.__name__}`" for error in errors)

"""Run programs on systems and compare what they saw.

A rank runs a program with plain modules and with this runtime, then, in a second call, with FSDP2. `outcome` puts the
ranks' answers together.
"""

import builtins
import collections
import contextlib
import dataclasses
import logging
import math
import random
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ragged_shard.testing import (
    RaceError,
    RankError,
    SimulatedDevice,
    record_collectives,
    run_ranks,
    simulated_ranks,
)

from .models import Model
from .program import CUTS, Program
from .refusals import Refused, refusal
from .systems import OPTIMIZERS, dtype_of, system, tolerance_of
from .world import ACTIONS, World, local_of

PADDING = 512.0  # bytes of a rank's shard
LIMIT = 20.0  # seconds until a rank counts as hanging
# In one process: there a program ends.
TORCH_RAISES = (
    "only allowed to backward once on any region",
    "cached during selective activation checkpoint has been mutated",
    "is a view and is being modified inplace",
    "Expected device to be set",  # by states of a fused optimizer that has made no step
)
SMALL = 128  # bytes of an all-reduce that moves no gradients


@dataclass
class Trace:
    """What a program saw on one rank of one system.

    Attributes:
        values: labels and values.
        error: the number of the action that raised, the error's type, its text and traceback; None: all ended.
        counts: of each `train`, the numbers of collectives by kind, and the bytes that this rank sent.
    """

    values: list[tuple[str, Any]]
    error: tuple[int, str, str, str] | None = None
    counts: list[tuple[dict[str, int], float]] = field(default_factory=list)


class Stopped(Exception):
    """A program ended early on this rank: the number of the action, the error's type, text and traceback."""


def run(program: Program, name: str, kind: type[World] = World) -> Trace:
    """Run a program on this rank, on a system by name."""
    with _settings(program):
        model = Model(program.layers, program.width, program.ends, program.recompute)
        world = kind(program, system(name), model, OPTIMIZERS[program.optimizer][0])
        trace, index = Trace(world.trace), -1
        try:
            world.build()
            for index in range(len(program.actions)):
                _act(world, index, trace)
            world.where = "end"
            world.rest()
            if not program.departs:
                world.system.check_memory(world.model, world.program, world.units)
            world.note_gradients()
            world.note_all("", world.params)
        except (Exception, CheckpointException) as error:  # DCP's does not derive from it
            trace.error = (index, type(error).__name__, str(error), traceback.format_exc())
    return trace


@contextlib.contextmanager
def _settings(program: Program) -> Iterator[None]:
    """The program's dtype and seed, no warnings and no log; ranks and this process serve other tests later."""
    dtype, level = torch.get_default_dtype(), logging.root.manager.disable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            if program.compiled:  # a function is not compiled again after a number of times
                torch._dynamo.reset()
            torch.set_default_dtype(dtype_of(program))
            torch.manual_seed(program.seed)
            yield
    finally:
        torch.set_default_dtype(dtype)
        logging.disable(level)


def _act(world: World, index: int, trace: Trace) -> None:
    """Run one action; count the collectives of training that nothing else came before."""
    name, *args = world.program.actions[index]
    world.where = f"{index} {name}"
    before = {one[0] for one in world.program.actions[:index]}
    counts = world.program.counted and name == "train" and before <= {"train", "step"}
    if "subclass" in world.program.layers and "train" not in before:
        counts = False  # ranks compare what the first gather of subclasses sends
    with record_collectives() if counts else contextlib.nullcontext() as record:
        ACTIONS[name].run(world, *args)
    if record is not None:
        # Without our comparisons of titles and of used parameters, which are as small whatever the model.
        least = 0 if world.system.name == "fsdp2" else SMALL
        moved = [event for event in record.events if event.kind != "all_reduce" or event.bytes_sent >= least]
        sent = sum(event.bytes_sent for event in moved)
        trace.counts.append((dict(collections.Counter(event.kind for event in moved)), sent))


# On a rank: the traces of the last program.
_last: dict[str, Any] = {}


def on_rank(program: Program) -> str | None:
    """On a rank: run a program alone and on this runtime; returns what differs.

    Raises:
        Stopped: this runtime raised where one process does not.
    """
    alone = run(program, "alone")
    ours = run(program, "ours")
    _last.clear()
    _last.update(program=program, ours=ours, alone=alone)
    if alone.error is not None and any(words in alone.error[2] for words in TORCH_RAISES):
        same = ours.error is not None and ours.error[:3] == alone.error[:3]
        return difference(program, alone, ours, tolerance_of(program)) if same else None
    if alone.error is not None:
        return f"one process raises {alone.error}"  # the program makes no sense
    if ours.error is not None:
        raise Stopped(*ours.error)
    return difference(program, alone, ours, tolerance_of(program))


def on_rank_of_fsdp2(program: Program) -> tuple[str | None, tuple[int, str, str, str] | None]:
    """On a rank, after `on_rank`: what differs from FSDP2, and FSDP2's error."""
    theirs = run(program, "fsdp2")
    if theirs.error is not None:
        return None, theirs.error
    if _last.get("program") != program:
        return None, None
    rounds = program.precision == "fp16" or program.optimizer == "muon"  # in another order than FSDP2
    most = tolerance_of(program) if rounds else min(tolerance_of(program), 0.02)
    if wrong := difference(program, _last["alone"], theirs, most):  # then FSDP2 is no measure
        return None, (0, "wrong", wrong, "")
    more = costs_more(program, theirs, _last["ours"])
    return more or difference(program, theirs, _last["ours"], most), None


def costs_more(program: Program, theirs: Trace, ours: Trace) -> str | None:
    """What `train` sends more than with FSDP2, beside the padding of small buffers; blocks may cost more."""
    for (kinds, sent), (own_kinds, own_sent) in zip(theirs.counts, ours.counts, strict=True):
        more = [kind for kind, count in own_kinds.items() if count > kinds.get(kind, 0)]
        padding = PADDING * program.ranks * sum(kinds.values())
        if more or (own_sent > sent + padding and not any(unit.blocks for unit in program.units)):
            return f"counts {kinds} {sent:.0f} B -> {own_kinds} {own_sent:.0f} B"
    return None


def difference(program: Program, wanted: Trace, found: Trace, tolerance: float) -> str | None:
    """The first difference of two traces, or None."""
    # A gradient near zero, whose sign rounding may turn, moves an element by a whole step of an optimizer like Adam.
    rounded = program.precision or program.quantized not in ("", "nf4")
    turned = 0.02 * len(program.actions) if rounded and program.optimizer != "sgd" else 0.0
    for (label, value), (other_label, other) in zip(wanted.values, found.values, strict=False):
        if label != other_label:
            return f"saw {other_label!r} instead of {label!r}"
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            if value.shape != other.shape or (value.dtype != other.dtype and not program.precision):
                return f"{label}: {value.shape} {value.dtype} -> {other.shape} {other.dtype}"
            if text := _off(value, other, tolerance, 0.0 if "grad of" in label else turned):
                return f"{label}: {text}"
        elif isinstance(value, float) and isinstance(other, float):
            if not math.isclose(value, other, rel_tol=tolerance):
                return f"{label}: {value} -> {other}"
        elif type(value) is not type(other) or (not isinstance(value, torch.Tensor) and value != other):
            return f"{label}: {_short(value)} -> {_short(other)}"
    if len(wanted.values) != len(found.values):
        return f"saw {len(found.values)} values instead of {len(wanted.values)}"
    return None


def _off(wanted: torch.Tensor, found: torch.Tensor, tolerance: float, more: float) -> str:
    one, other = wanted.double(), found.double()
    if not one.numel():
        return ""
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return f"{int((~finite).sum())} -> {int((~other.isfinite()).sum())} elements that are not finite"
    off = (one - other)[finite].abs()
    largest = float(one[finite].abs().max()) if finite.any() else 0.0
    if off.numel() and float(off.max()) > tolerance * max(largest, 0.05) + more:
        return f"off by {float(off.max()):.3g}, of at most {largest:.3g}"
    return ""


def _short(value: Any) -> str:
    return f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:200]


@dataclass
class Outcome:
    """The result of a program.

    Attributes:
        fault: its description, or ""; the first word is a kind: "value", "error", "fsdp2", "hang", "crash", "race".
        ours, theirs: the error of this runtime and of FSDP2, "" if there was none or it did not run.
    """

    fault: str = ""
    ours: str = ""
    theirs: str = ""


def outcome(program: Program, simulated: bool = False, limit: float = LIMIT) -> Outcome:
    """Run a program on its ranks, or one rank of it on the simulated device.

    Args:
        program: to run.
        simulated: run one rank on the simulated device.
        limit: seconds until a rank counts as hanging; more for `torch.compile` and where ranks wait to be sure.
    """
    if simulated:
        return _simulated(program)
    result = Outcome()
    stopped: dict[int, Stopped] = {}
    limit *= 9 if program.compiled else 3 if program.departs or program.uneven else 1
    try:
        answers = run_ranks(program.ranks, on_rank, program, timeout=limit, seed=0)
    except RankError as error:
        stopped = {rank: cause for rank, cause in error.causes.items() if isinstance(cause, Stopped)}
        if not stopped:
            result.fault = f"hang {error}" if "did not answer" in str(error) else f"crash {error}"
            return result
        result.ours = _said(stopped)
        answers = []
    if any(error.args[1] == "Late" for error in stopped.values()):
        result.fault = f"late {result.ours}"
        return result
    if program.departs and stopped and all(error.args[0] >= program.departure for error in stopped.values()):
        return result
    if wrong := {rank: text for rank, text in enumerate(answers) if text}:
        result.fault = f"value {wrong}"
        return result
    theirs = None
    if program.for_fsdp2:
        theirs, result.theirs, different = _fsdp2(program, bool(stopped), limit)
        if different:
            result.fault = f"fsdp2 {different}"
            return result
    if stopped:
        result.fault = judge(program, stopped, theirs)
    return result


def _said(stopped: dict[int, Stopped]) -> str:
    return "\n".join(
        f"rank {rank}: {e.args[0]} {e.args[1]}: {e.args[2]}" for rank, e in sorted(stopped.items())
    )


def _fsdp2(program: Program, stopped: bool, limit: float) -> tuple[Any, str, str]:
    """FSDP2's error, its text, and what differs from ours."""
    try:
        answers = run_ranks(program.ranks, on_rank_of_fsdp2, program, timeout=limit / 2, seed=0)
    except RankError as error:
        return (0, "hang"), f"hangs {str(error)[:200]}", ""
    errors = [error for _, error in answers if error is not None]
    text = f"{errors[0][0]} {errors[0][1]}: {errors[0][2]}" if errors else ""
    different = {rank: text for rank, (text, _) in enumerate(answers) if text}
    return (errors[0] if errors else None), text, "" if stopped or not different else str(different)


def judge(program: Program, stopped: dict[int, Stopped], theirs: Any) -> str:
    """The fault in errors of this runtime that one process does not have, or "" if they are right."""
    kinds = {(error.args[0], error.args[1]) for error in stopped.values()}
    index, kind, text, trace = next(iter(stopped.values())).args
    if len(stopped) < program.ranks or len(kinds) > 1:
        if program.uneven and all(refusal(program, *error.args[:3]) for error in stopped.values()):
            return ""  # autograd raises on the ranks that used a parameter
        return f"error not on all ranks: {_said(stopped)}"
    if theirs is not None and theirs[0] == index and _related(theirs[1], kind):
        return ""
    if row := refusal(program, index, kind, text):
        return after_remedy(program, row, index) if row.remedy else ""
    if theirs is None and program.for_fsdp2:
        return f"error where FSDP2 works: {index} {kind}: {text}\n{trace}"
    return f"error {index} {kind}: {text}\n{trace}"


def after_remedy(program: Program, row: Refused, index: int) -> str:
    """The fault of a program that does as a refusal says, or "" if there is none and it is not refused again."""
    assert row.remedy is not None
    remedied = row.remedy(program, index)
    result = Outcome("the same program") if remedied == program else outcome(remedied)
    if result.fault:
        return f"remedy of {row.words!r}: {result.fault}"
    again = re.match(r"rank \d+: (-?\d+) ", result.ours)
    if again and int(again[1]) <= index and program.actions[: index + 1] == remedied.actions[: index + 1]:
        return f"remedy of {row.words!r}: refused again, {result.ours}"
    return ""


def _related(one: str, other: str) -> bool:
    """Whether one type of error is the other's base, by names."""
    kinds = [getattr(builtins, name, Exception) for name in (one, other)]
    return one == other or issubclass(kinds[0], kinds[1]) or issubclass(kinds[1], kinds[0])


class _OneRank(World):
    """A world whose values nobody compares: on the simulated device other ranks do not exist."""

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        return local_of(tensor).detach() * 1


# Actions that need values sent by other ranks.
_NEED_RANKS = (
    "checkpoint", "checkpoint_elsewhere", "files", "full_state_dict", "optimizer_states", "stream", "edit_full",
    "average_of_weights", "pipeline", "other_blocks",
)  # fmt: skip


def _simulated(program: Program) -> Outcome:
    """Run one rank on the simulated device, which raises where memory is used without an order."""
    actions = tuple(one for one in program.actions if one[0] not in _NEED_RANKS)
    mesh = "shard" if program.mesh in CUTS else program.mesh
    program = dataclasses.replace(program, actions=actions, mesh=mesh, transport="")
    chance = random.Random(program.seed)
    where = "cpu:0" if program.offload or any(unit.offload for unit in program.units) else "cpu"
    rank = chance.randrange(program.ranks)
    try:
        with SimulatedDevice(where), simulated_ranks(program.ranks, rank=rank):
            trace = run(program, "simulated", _OneRank)
    except RaceError as error:  # at memory that was freed too early, where nothing could raise
        return Outcome(fault=f"race at the end {error}")
    result = Outcome(
        ours="" if trace.error is None else f"{trace.error[0]} {trace.error[1]}: {trace.error[2]}"
    )
    if trace.error is not None and trace.error[1] == "RaceError":
        result.fault = f"race {trace.error[0]} {trace.error[2]}\n{trace.error[3]}"
    return result

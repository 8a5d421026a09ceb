"""Make a failing program smaller: leave out actions, layers, units and options while it fails in the same way."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.programs.program import Program, Unit
from tests.programs.surgery_actions import relaid

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Program) if field.name != "seed"}


def shrunk(program: Program, fault: str, fault_of: Callable[[Program], str], seconds: float) -> Program:
    """The smallest program found within some seconds with a fault of the same kind."""
    deadline, smaller, kind = time.monotonic() + seconds, True, kind_of(fault)
    while smaller:
        smaller = False
        for candidate in _candidates(program):
            if time.monotonic() > deadline:
                return program
            if kind_of(fault_of(candidate)) == kind:
                program, smaller = candidate, True
                break
    return program


def _candidates(program: Program) -> Iterator[Program]:
    """Programs with less, those with much less first."""
    change: Callable[..., Program] = lambda **fields: dataclasses.replace(program, **fields)  # noqa: E731
    count = len(program.actions)
    for size in (count // 2, count // 4, 1):
        for start in range(0, count, size) if size else ():
            yield change(actions=program.actions[:start] + program.actions[start + size :])
    for index in range(len(program.layers) if len(program.layers) > 1 + program.departs else 0):
        yield _without_layer(program, index)
    for index, unit in enumerate(() if program.departs else program.units):
        if "" not in unit.modules:
            yield change(units=program.units[:index] + program.units[index + 1 :])
    for ranks in range(2 if program.departs else 1, program.ranks):
        if program.mesh == "shard" and not (ranks < 4 and any(unit.reshard == 2 for unit in program.units)):
            yield change(ranks=ranks)
    for name in (
        "mesh",
        "ends",
        "recompute",
        "precision",
        "transport",
        "offload",
        "optimizer",
        "quantized",
        "hooked",
        "ignored",
        "replicas",
        "module_hooks",
    ):
        if getattr(program, name) != DEFAULTS[name]:
            yield change(**{name: DEFAULTS[name]})
    if program.uneven and not any(unit.skippable for unit in program.units):
        yield change(uneven=False)
    for index, unit in enumerate(program.units):
        for plain in _plainer(unit):
            yield change(units=(*program.units[:index], plain, *program.units[index + 1 :]))
    for index, kind in enumerate(program.layers):
        if kind != "linear":
            yield change(layers=(*program.layers[:index], "linear", *program.layers[index + 1 :]))


def _plainer(unit: Unit) -> Iterator[Unit]:
    plain: dict[str, Any] = {"reshard": None, "blocks": "", "skippable": False, "offload": False}
    for name, value in plain.items():
        if getattr(unit, name) != value:
            yield dataclasses.replace(unit, **{name: value})


def _without_layer(program: Program, index: int) -> Program:
    """Leave a layer out, and what units have of it; later layers move up."""
    order = [old for old in range(len(program.layers)) if old != index]
    places = {old: place for place, old in enumerate(order)}
    return relaid(program, places, tuple(program.layers[old] for old in order))


def kind_of(fault: str) -> tuple[str, str]:
    """What must stay the same while a program shrinks: the fault's first word, and the type of an error in it."""
    first, _, rest = fault.partition(" ")
    error = re.search(r"\w+Error\b", rest.partition("\n")[0])
    return first, error.group() if error and first == "error" else ""

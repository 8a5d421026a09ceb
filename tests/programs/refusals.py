"""What this runtime refuses where one process works, as its documentation says, and what users are to do instead."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .program import CUTS, Action, Program

Remedy = Callable[[Program, int], Program]  # of a program and the number of the action that raises


@dataclass(frozen=True)
class Refused:
    """A refusal of this runtime where one process works.

    Attributes:
        action, error, words: the action that raises, "" for any, the error's type, a part of its text that a user
            acts on.
        when: of the program.
        remedy: the program as its text says; None: the text is torch's, or names what no program does.
    """

    action: str
    error: str
    words: str
    when: Callable[[Program], bool] = lambda program: True
    remedy: Remedy | None = None

    def applies(self, program: Program, index: int, error: str, text: str) -> bool:
        """Whether this is the refusal that a program met."""
        action = program.actions[index][0] if index >= 0 else "wrap"
        met = self.action in ("", action) and error == self.error and self.words in text
        return met and self.when(program)


def refusal(program: Program, index: int, error: str, text: str) -> Refused | None:
    """The refusal that a program met, if it is in the table."""
    return next((row for row in REFUSED if row.applies(program, index, error, text)), None)


# -- remedies ----------------------------------------------------------------------------------------------------------


def _instead(*actions: Action) -> Remedy:
    """Other actions."""

    def remedy(program: Program, index: int) -> Program:
        taken = (*program.actions[:index], *actions, *program.actions[index + 1 :])
        return dataclasses.replace(program, actions=taken)

    return remedy


def _with(**arguments: Any) -> Remedy:
    """More arguments for the action."""
    return lambda program, index: _instead((*program.actions[index], *arguments.values()))(program, index)


def _without(name: str) -> Remedy:
    """The program without an action."""

    def remedy(program: Program, index: int) -> Program:
        return dataclasses.replace(program, actions=tuple(one for one in program.actions if one[0] != name))

    return remedy


def _ignored(part: str) -> Remedy:
    """Parameters with this in their names are in no unit."""
    return lambda program, index: dataclasses.replace(program, ignored=(*program.ignored, part))


def _units(**options: Any) -> Remedy:
    """Other options of all units."""

    def remedy(program: Program, index: int) -> Program:
        units = tuple(dataclasses.replace(unit, **options) for unit in program.units)
        return dataclasses.replace(program, units=units)

    return remedy


def _skippable(program: Program, index: int) -> Program:
    """Experts may be skipped."""
    return dataclasses.replace(
        program,
        units=tuple(
            dataclasses.replace(unit, skippable=any("layers." in path for path in unit.modules))
            for unit in program.units
        ),
    )


def _kept_after_forward(program: Program, index: int) -> Program:
    """Nothing is freed after forward, and checkpoints are not reentrant: docs/troubleshooting.md."""
    units = tuple(dataclasses.replace(unit, reshard=False) for unit in program.units)
    frees = ("reshard_after_forward",), ("between", "set_reshard_after_forward")
    actions = tuple(one for one in program.actions if one[:1] not in frees and one[:2] not in frees)
    recompute = "plain" if program.recompute == "reentrant" else program.recompute
    return dataclasses.replace(program, units=units, actions=actions, recompute=recompute)


# -- the table ---------------------------------------------------------------------------------------------------------


def _freed(program: Program) -> bool:
    """Whether a layer needs weights of a unit whose memory, or place in modules, is gone with that unit's outputs."""
    own = {path for unit in program.units for path in unit.modules if len(unit.modules) == 1}
    return program.ends == "head twice" or any(
        f"layers.{index}" not in own for index in range(len(program.layers))
    )


def _tp(program: Program) -> bool:
    return program.mesh == "tp"


def _cut(program: Program) -> bool:
    return program.mesh in CUTS


def _loses_a_layer(program: Program) -> bool:
    return any(action[0] in ("remove_layer", "replace_layer") for action in program.actions)


def _recomputed(program: Program) -> bool:
    return bool(program.recompute) and _freed(program)


def _unparametrized(program: Program) -> bool:
    return any(name == "remove_parametrizations" for name, *_ in program.actions)


# Backward of intermediates whose unit's outputs are gone: docs/troubleshooting.md.
_INTERMEDIATES = ("captured", "gradient_of_a_layer", "keep", "release")
REFUSED = [
    # Parameters are gathered where `fully_shard` saw them.
    Refused("remove_parametrizations", "ValueError", "before fully_shard", remedy=_instead()),
    Refused("remove_parametrizations", "ValueError", "different shardings"),  # torch's
    Refused(
        "remove_parametrizations", "NotImplementedError", "full_params(model)",
        remedy=_instead(("remove_parametrizations", "whole")),
    ),
    Refused(
        "", "RuntimeError", "remove parametrizations before it", _unparametrized,
        _without("remove_parametrizations"),
    ),
    Refused(
        "", "NotImplementedError", "call the module that has the parameter", _unparametrized,
        _without("remove_parametrizations"),
    ),
    # Modules that write to gathered weights, return them, or write to a unit's input: torch's refusal, as FSDP2's.
    Refused("", "RuntimeError", "ignored_params", lambda p: "max norm" in p.layers, _ignored(".table")),
    Refused(
        "", "RuntimeError", "set_reshard_after_forward(False", lambda p: "returns weight" in p.layers,
        _kept_after_forward,
    ),
    Refused("", "RuntimeError", "is being modified inplace", lambda p: "changes input" in p.layers),
    Refused("edit_full", "NotImplementedError", "use its full_tensor()", remedy=_with(each=True)),
    Refused("stream", "NotImplementedError", "use its full_tensor()", _cut, _with(each=True)),
    Refused(  # eye_
        "initialize", "NotImplementedError", "full_params(model)", lambda p: not _cut(p), _with(whole=True),
    ),
    Refused("initialize", "NotImplementedError", "full_params(model)", _cut),  # which full_params refuses
    Refused("clip_by_norm", "NotImplementedError", "copies=True", _tp, _instead(("clip", 0.5, 2.0, True, True))),
    Refused("clip", "NotImplementedError", "copies=True", _tp, _with(copies=True)),
    Refused("wrap", "ValueError", "AdamW8bit.block_policy", remedy=_units(blocks="adamw8bit")),
    Refused("gradients_by_name", "NotImplementedError", "Call loss.backward()", remedy=_instead(("train",))),
    # torch's, of sharded parameters
    Refused("gradients_by_name", "RuntimeError", "not have been used in the graph"),
    *(
        Refused(name, "RuntimeError", "modified by an inplace operation", _freed, _kept_after_forward)
        for name in _INTERMEDIATES
    ),
    # torch makes a DTensor's transposed view again before it compares the counts of writes
    *(
        Refused(name, "RuntimeError", "setStorage", lambda p: _tp(p) and _freed(p), _kept_after_forward)
        for name in _INTERMEDIATES
    ),
    # Ranks whose unit is complete at other times: a unit that ranks use differently wants skippable=True.
    *(
        Refused(name, "RuntimeError", "skippable=True", lambda p: p.uneven, _skippable)
        for name in (*_INTERMEDIATES, "two_forwards")
    ),
    Refused("captured", "NotImplementedError", "its unshard() before", _recomputed, _with(by_hand=True)),
    # torch's RNNs compare dtypes before any op meets the sharded weight
    Refused("captured", "ValueError", "RNN input dtype", _recomputed, _kept_after_forward),
    Refused(
        "option", "NotImplementedError", "call it on units without them",
        lambda p: "subclass" in p.layers, _instead(),
    ),
    # Each rank of tensor parallelism has scales of its own piece.
    *(
        Refused(name, "CheckpointException", "Size mismatch", lambda p: p.optimizer == "adamw8bit")
        for name in ("checkpoint_elsewhere", "pipeline", "other_blocks")
    ),
    Refused(
        "other_blocks", "ValueError", "weight", lambda p: bool({"split", "routed"} & {*p.layers}),
        _instead(("other_blocks", "same", 0, 0)),
    ),
    # The unit around a layer that is gone still has its parameters, which the model does not convert.
    Refused("to_dtype", "ValueError", "convert all of them", _loses_a_layer),
]  # fmt: skip

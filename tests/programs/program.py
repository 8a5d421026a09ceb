"""A program as data: a model, its wrapping, an optimizer and what a user does, in a literal that can be kept.

    Program(seed=813, ranks=3, layers=("linear", "experts"), actions=(("train",), ("step",)))

`draw(seed)` makes one, `runs.run` runs it, `shrink.shrunk` makes a failing one smaller.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import (  # noqa: F401 (they enter all actions)
    autograd_actions,
    failure_actions,
    hook_actions,
    optimizer_actions,
    pipeline_actions,
    surgery_actions,
    unit_actions,
)
from . import world as doings
from .expert_parallel import Routed
from .layer_actions import HOW
from .layers import LAYERS
from .models import ENDS, RECOMPUTES
from .module_hooks import MODULE_HOOKS, PLACES

LAYERS["routed"] = Routed
CUTS = ("tp", "ep")  # meshes with an axis that another parallelism than that of data cuts parameters over
Action = tuple[Any, ...]  # the name of an action and its arguments


class _Literal:
    """Prints the fields that differ from their defaults."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = ((field, getattr(self, field.name)) for field in fields)
        inside = ", ".join(f"{f.name}={value!r}" for f, value in values if value != f.default)
        return f"{type(self).__name__}({inside})"


@dataclass(frozen=True, repr=False)
class Unit(_Literal):
    """One call of `fully_shard`.

    Attributes:
        modules: paths; several are a list of modules; "" is the model.
        reshard: `reshard_after_forward`.
        blocks: a name of `systems.POLICIES`.
        skippable: as the option of `fully_shard`.
        offload: whether its shards are in CPU memory, whatever the program says of all units.
    """

    modules: tuple[str, ...] = ("",)
    reshard: bool | int | None = None
    blocks: str = ""
    skippable: bool = False
    offload: bool = False


@dataclass(frozen=True, repr=False)
class Program(_Literal):
    """What is built and what is done with it.

    Attributes:
        seed: of parameters and batches.
        ranks: 1 to 4.
        mesh: "shard"; "hsdp": 2 replicas; "tp": 2 ranks of tensor parallelism; "ep": of experts;
            "two": vectors have replicas.
        replicas: "tp" has 2 replicas instead of 2 ranks that shard.
        layers: kinds of `models.LAYERS`, in order.
        ends: "", or how embedding and head are used besides: `models.ENDS`.
        width: of all layers.
        rows: "", or "per rank": each rank has batches of its own size.
        recompute: "", a name of `models.RECOMPUTES`, or "part": the checkpointing of each layer.
        compiled: "", "layers" or "model": what runs under `torch.compile`.
        units: calls of `fully_shard`, in order.
        uneven: ranks choose experts, each its own.
        precision, quantized, offload, transport: names of tables in `systems`.
        ignored: parts of names: parameters that no unit takes, which stay plain.
        hooked: "", or which hooks parameters have before they are sharded: a name of `world.HOOKS`.
        module_hooks: "", or "kind: place" of tables in `module_hooks`: hooks of modules before they are sharded.
        optimizer: a name of `systems.OPTIMIZERS`.
        counted: collectives of `train` are compared with FSDP2's.
        actions: names of `actions.ACTIONS` with arguments.
    """

    seed: int = 0
    ranks: int = 2
    mesh: str = "shard"
    replicas: bool = False
    layers: tuple[str, ...] = ("linear",)
    ends: str = ""
    width: int = 5
    rows: str = ""
    recompute: str = ""
    compiled: str = ""
    units: tuple[Unit, ...] = (Unit(),)
    uneven: bool = False
    precision: str = ""
    quantized: str = ""
    offload: bool = False
    transport: str = ""
    ignored: tuple[str, ...] = ()
    hooked: str = ""
    module_hooks: str = ""
    optimizer: str = "sgd"
    counted: bool = False
    actions: tuple[Action, ...] = (("train",), ("step",))

    @property
    def for_fsdp2(self) -> bool:
        """Whether FSDP2 has all that the program uses."""
        ours_alone = self.uneven or self.quantized or self.transport or self.hooked or self.mesh == "two"
        inside = any(path.endswith(".energy") for unit in self.units for path in unit.modules)  # FSDP2 raises
        uneven_rows = "subclass" in self.layers and self.width % self.ranks  # which FSDP2 would have it pad
        skippable = any(unit.skippable for unit in self.units)
        dies = "returns weight" in self.layers  # FSDP2 reads memory that it has freed
        return not (ours_alone or inside or uneven_rows or skippable or dies) and all(
            doings.ACTIONS[name].fsdp2 for name, *_ in self.actions
        )

    def is_plain(self, name: str) -> bool:
        """Whether no unit has a parameter: then averaging its gradient is the user's."""
        paths = [path for unit in self.units for path in unit.modules]
        inside = any(path == "" or name.startswith(f"{path}.") for path in paths)
        return not inside or any(part in name for part in self.ignored)

    @property
    def departs(self) -> bool:
        """Whether a rank leaves the others' order on purpose: then a rank must raise, or all values are right."""
        return any(doings.ACTIONS[name].departs for name, *_ in self.actions)

    @property
    def departure(self) -> int:
        """Number of the first action in which a rank leaves the others' order."""
        return next(i for i, (name, *_) in enumerate(self.actions) if doings.ACTIONS[name].departs)


# Layers that take gradients, or call torch.func, in their forward.
NESTED = {"forces", "constant forces", "function grad", "vmap", "function call"}
# Actions that read a layer's output from behind the model.
CAPTURE = {"captured", "gradient_of_a_layer", "backward_of_inputs", "several_roots", "tensor_hook"}
PRODUCTS = {"own function", "later context"}  # which autocast leaves alone: that is for their authors
# What torch, or our stand-in for one process, does not put together: what is drawn instead, and where.
APART: list[tuple[dict[str, Any], Callable[[Program], bool]]] = [
    ({"recompute": "plain"}, lambda p: p.recompute == "no rng" and "dropout" in p.layers),
    (
        {"recompute": "plain"},
        lambda p: (
            p.recompute == "selective"
            and bool(
                {*p.layers, p.quantized} & {"lstm", "gru", "rnn", "int8", "int8 both", "fp8", "nf4", *NESTED}
            )
        ),
    ),
    # Views that leave a compiled function, or change in it; a backward of its backward.
    ({"compiled": ""}, lambda p: bool({*p.layers} & {"structured", "changes input", *NESTED})),
    # What leaves a compiled model beside its output has no gradient of its own.
    ({"compiled": "layers"}, lambda p: p.compiled == "model" and bool({a[0] for a in p.actions} & CAPTURE)),
    ({"rows": ""}, lambda p: p.mesh == "ep"),  # experts gather the same number of rows from each rank
    ({"module_hooks": ""}, lambda p: "backward" in p.module_hooks and bool({*p.layers} & NESTED)),
]


def read(text: str) -> Program:
    """The program of a literal; lines of comment are left out."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    program = eval("\n".join(lines), {"Program": Program, "Unit": Unit})  # a file of this repository
    assert isinstance(program, Program)
    return program


def names(program: Program) -> set[str]:
    """The names of layers, actions and options in a program."""
    found = set(re.findall(r"'[\w() ]+'|\w+='?[\w ]+", repr(dataclasses.replace(program, seed=0))))
    rooted = any("" in unit.modules for unit in program.units)
    return found | ({"ignored"} if program.ignored else set()) | (set() if rooted else {"no root"})


def draw(seed: int) -> Program:
    """A program, of this seed alone."""
    rng = random.Random(seed)
    ranks = rng.choice((1, 2, 2, 3, 3, 4, 4))
    mesh = _mesh(rng, ranks)
    program = Program(
        seed=seed,
        ranks=ranks,
        mesh=mesh,
        replicas=mesh == "tp" and ranks == 4 and rng.random() < 0.5,
        layers=_layers(rng, mesh),
        ends=rng.choice(("", "", "", *ENDS)),
        width=rng.choice((5, 6, 8)),
        rows=rng.choices(("", "per rank"), (12, 1))[0],
        recompute=rng.choices(("", *RECOMPUTES, "part"), (60, 12, 12, 4, 4, 4, 4, 4))[0],
        compiled=rng.choices(("", "layers", "model"), (97, 1.5, 1.5))[0],
        offload=rng.random() < 0.08,
        transport=rng.choice(("collectives", "peer_memory")) if rng.random() < 0.15 else "",
        module_hooks=f"{rng.choice(list(MODULE_HOOKS))}: {rng.choice(PLACES)}" if rng.random() < 0.1 else "",
    )
    program = dataclasses.replace(program, **_numbers(rng, program))
    program = dataclasses.replace(program, uneven="experts" in program.layers and rng.random() < 0.4)
    program = dataclasses.replace(program, units=_units(rng, program))
    # Other parallelism and subclasses replace parameters, without their hooks.
    if rng.random() < 0.06 and mesh not in CUTS and "subclass" not in program.layers:
        program = dataclasses.replace(program, hooked=rng.choice(list(doings.HOOKS)))
    if rng.random() < 0.065 and ranks > 1 and mesh == "shard" and not program.quantized:
        program = _departing(rng, program)
    else:
        program = dataclasses.replace(program, **_outside(rng, program))
        program = dataclasses.replace(program, actions=_actions(rng, program))
    # An expert is gathered ahead for a batch that turns out not to choose it: FSDP2 gathers it when it runs.
    experts = any("experts" in path for unit in program.units for path in unit.modules)
    counted = rng.random() < 0.3 and not (program.compiled or experts)
    program = dataclasses.replace(program, counted=counted)
    for change, when in APART:
        program = dataclasses.replace(program, **(change if when(program) else {}))
    return program


def _layers(rng: random.Random, mesh: str) -> tuple[str, ...]:
    weights = [kind.weight for kind in LAYERS.values()]
    layers = tuple(rng.choices(list(LAYERS), weights, k=rng.randrange(1, 4)))
    return (*layers[:2], {"tp": "split", "ep": "routed"}[mesh]) if mesh in CUTS else layers


def _numbers(rng: random.Random, program: Program) -> dict[str, Any]:
    """Formats of numbers, and an optimizer and layers for which a tolerance is known with them."""
    special, layers, precision, quantized = rng.random(), program.layers, "", ""
    if special < 0.15:
        precision = rng.choice(("bf16", "fp16", "fp16", "mixed", "reduce32", "output", "autocast"))
    elif special < 0.22:
        quantized = rng.choice(("fp8", "int8", "int8 both", "bf16", "nf4"))
    if "subclass" in layers or program.compiled or any(LAYERS[kind].keeps for kind in layers):
        quantized = ""
    optimizer = rng.choice(("sgd", "sgd", "adamw", "adamw", *doings.OPTIMIZERS))
    if rng.random() < 0.3:
        optimizer = rng.choice([*optimizer_actions.TORCH])
    # Roots and polar factors make rounding larger than any bound of a format.
    if (precision or quantized) and optimizer in ("soap", "shampoo", "muon"):
        optimizer = "adamw"
    if precision:  # inputs must be the same bits, and buffers and dropout's masks are not cast
        apart = {kind for kind in layers if not LAYERS[kind].casts}
        apart |= PRODUCTS if precision == "autocast" else set()
        layers = tuple("linear" if kind in apart else kind for kind in layers)
    return {"precision": precision, "quantized": quantized, "optimizer": optimizer, "layers": layers}


def _departing(rng: random.Random, program: Program) -> Program:
    """A program in whose last action a rank leaves the others' order."""
    layers = (*program.layers, "experts")
    last = rng.choice([name for name, kind in doings.ACTIONS.items() if kind.departs])
    # Between hooks of one unit there is no other collective, at which ranks would fail.
    inner = () if last == "norms_in_hooks" else (Unit((f"layers.{i}",)) for i in range(len(layers)))
    program = dataclasses.replace(program, compiled="", uneven=False, layers=layers, units=(*inner, Unit()))
    actions = (*_actions(rng, program)[:3], ("train",), (last, *doings.ACTIONS[last].draw(rng)))
    return dataclasses.replace(program, actions=actions)


def _outside(rng: random.Random, program: Program) -> dict[str, Any]:
    """Parameters that are in no unit: ignored ones, or those of a model whose root is none."""
    # Of what else cuts a parameter DDP knows nothing; policies say nothing of parameters outside units.
    fits = program.mesh not in CUTS and not (program.precision or program.quantized)
    if rng.random() > 0.1 or not fits:
        return {}
    if rng.random() < 0.5:
        return {"ignored": (rng.choice(("norm.weight", ".bias", "layers.0.", "embed.")),)}
    # A tied weight needs a unit around both places, and a skippable unit one that is not.
    skippable = any(unit.skippable for unit in program.units)
    if program.ends == "tied" or len(program.units) == 1 or skippable:
        return {}
    return {"units": tuple(unit for unit in program.units if "" not in unit.modules)}


def _actions(rng: random.Random, program: Program) -> tuple[Action, ...]:
    """Two to seven actions, some with a step behind them, and what goes with the program's rarer parts."""
    kinds = {name: kind for name, kind in doings.ACTIONS.items() if not kind.departs}
    names = rng.choices(list(kinds), [kind.weight for kind in kinds.values()], k=rng.randrange(2, 8))
    if program.mesh == "hsdp" and rng.random() < 0.3:
        names[rng.randrange(len(names))] = "accumulate_over_replicas"
    if (
        program.uneven
    ):  # a unit is reduced after each forward: a rank whose expert ran in the other has nothing then
        names = ["train" if name in ("two_forwards", "twice_through") else name for name in names]
    if program.precision == "fp16":  # which has no huge values
        names = ["scaled" if name == "odd_gradient" else name for name in names]
    taken: list[Action] = []
    for name in names:
        taken.append((name, *kinds[name].draw(rng)))
        if kinds[name].gradients and rng.random() < 0.8:
            taken.append(("step",))
    for one in _beside(rng, program):
        if rng.random() < 0.4:
            taken += [one, ("train",), ("step",)]
    return tuple(taken)


def _beside(rng: random.Random, program: Program) -> Iterator[Action]:
    """Actions that matter where a program has rarer parts."""
    if any(LAYERS[kind].keeps for kind in program.layers):
        yield ("state_dict", "assign")
    if program.hooked:
        yield ("accumulate_hooks",)
    if program.optimizer == "adamw8bit" and not program.precision + program.quantized:
        yield ("other_blocks", *doings.ACTIONS["other_blocks"].draw(rng))
    if program.optimizer == "muon":
        yield from (("route", *doings.ACTIONS["route"].draw(rng)), ("schedules", "one cycle"))
    if any(len(unit.modules) > 1 for unit in program.units):
        yield ("to_dtype",)
    if any(unit.offload for unit in program.units):
        yield from (("reshard_after_backward", False), ("accumulate_hooks",), ("all_reduce_hook",))
    if "parametrized" in program.layers:
        yield ("remove_parametrizations", rng.choice(HOW))


def _mesh(rng: random.Random, ranks: int) -> str:
    if ranks == 4:
        return rng.choice(("shard", "shard", "hsdp", "hsdp", "tp", "ep", "two"))
    return rng.choice(("shard", "shard", "shard", "tp", "ep")) if ranks == 2 else "shard"


def _units(rng: random.Random, program: Program) -> tuple[Unit, ...]:
    """Some layers, experts, the ends together, and the model, inner ones first."""
    layers, ends, subclass = program.layers, program.ends, "subclass" in program.layers
    halves = program.ranks == 4 and not (program.replicas or subclass or program.mesh in ("two", "ep"))
    reshard = [None, True, True, False, *([2] if halves else [])]
    blocks = ["", "", "rows", "rows" if subclass else "tiles", "whole"]
    if program.optimizer == "adamw8bit":
        blocks = ["adamw8bit"]
    offloads = rng.random() < 0.08

    def unit(*modules: str, skippable: bool = False) -> Unit:
        offload = offloads and rng.random() < 0.5
        return Unit(modules, rng.choice(reshard), rng.choice(blocks), skippable, offload)

    units = []
    for index, kind in enumerate(layers):
        skippable = kind == "experts" and (program.uneven or rng.random() < 0.3)
        if kind == "experts" and rng.random() < 0.6:
            units += [unit(f"layers.{index}.experts.{i}", skippable=skippable) for i in range(2)]
        if kind == "routed" and rng.random() < 0.5:
            units.append(unit(f"layers.{index}.bank"))
        if "forces" in kind and rng.random() < 0.5:
            units.append(unit(f"layers.{index}.energy"))
        if rng.random() < 0.8:
            units.append(unit(f"layers.{index}"))
    if len(layers) > 1 and rng.random() < 0.1:
        units = [unit("layers.0", "layers.1")]
    if ends in ("", "tied") and rng.random() < 0.25:
        if ends == "tied" and rng.random() < 0.5:  # then the unit around both gathers the weight
            units += [unit("embed"), unit("head")]
        else:
            units.append(unit("norm", "head") if ends == "" else unit("embed", "head"))
    units.append(unit(""))
    if rng.random() < 0.15:
        rng.shuffle(units)
        units.sort(key=_depth, reverse=True)
    return tuple(units)


def _depth(unit: Unit) -> int:
    return max(len(name.split(".")) if name else 0 for name in unit.modules)

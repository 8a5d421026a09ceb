"""A program as data: a model, its wrapping, an optimizer and what a user does, in a literal that can be kept.

    Program(seed=813, ranks=3, layers=("linear", "experts"), actions=(("train",), ("step",)))

`draw(seed)` makes one, `runs.run` runs it, `shrink.shrunk` makes a failing one smaller.
"""

import dataclasses
import random
import re
from collections.abc import Callable
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
    def compiles(self) -> bool:
        """Whether anything runs under `torch.compile`."""
        return bool(self.compiled) or "compiled" in self.layers

    @property
    def departs(self) -> bool:
        """Whether a rank leaves the others' order on purpose: then a rank must raise, or all values are right."""
        return any(doings.ACTIONS[name].departs for name, *_ in self.actions)

    @property
    def departure(self) -> int:
        """Number of the first action in which a rank leaves the others' order."""
        return next(i for i, (name, *_) in enumerate(self.actions) if doings.ACTIONS[name].departs)


NESTED = {
    "forces",
    "constant forces",
    "function grad",
    "vmap",
    "function call",
}  # gradients, or torch.func, inside
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
    layers = tuple(
        rng.choices(list(LAYERS), [kind.weight for kind in LAYERS.values()], k=rng.randrange(1, 4))
    )
    if mesh == "tp":
        layers = (*layers[:2], "split")
    if mesh == "ep":
        layers = (*layers[:2], "routed")
    ends = rng.choice(("", "", "", *ENDS))
    special = rng.random()
    precision = (
        rng.choice(("bf16", "fp16", "fp16", "mixed", "reduce32", "output", "autocast"))
        if special < 0.15
        else ""
    )
    quantized = rng.choice(("fp8", "int8", "int8 both", "bf16", "nf4")) if 0.15 < special < 0.22 else ""
    compiled = rng.choices(("", "layers", "model"), (97, 1.5, 1.5))[0]
    compiles = bool(compiled) or "compiled" in layers
    if "subclass" in layers or compiles or any(LAYERS[kind].keeps for kind in layers):
        quantized = ""
    mixed_offload = rng.random() < 0.08
    uneven = "experts" in layers and rng.random() < 0.4
    optimizer = rng.choice(("sgd", "sgd", "adamw", "adamw", *doings.OPTIMIZERS))
    if rng.random() < 0.3:
        optimizer = rng.choice([*optimizer_actions.TORCH])
    if precision:  # their inputs must be the same bits, and buffers and dropout's masks are not cast
        optimizer = "adamw" if optimizer in ("soap", "shampoo", "muon") else optimizer
        casts = {kind for kind in layers if LAYERS[kind].casts} - (
            PRODUCTS if precision == "autocast" else set()
        )
        layers = tuple(kind if kind in casts else "linear" for kind in layers)
    if quantized:  # roots and polar factors make rounding larger than any bound of a format
        optimizer = "adamw" if optimizer in ("soap", "shampoo", "muon") else optimizer
    replicas = mesh == "tp" and ranks == 4 and rng.random() < 0.5
    units = _units(rng, layers, ends, ranks - replicas, mesh, uneven)
    if "subclass" in layers:
        units = tuple(
            dataclasses.replace(
                unit,
                reshard=True if unit.reshard == 2 else unit.reshard,
                blocks="rows" if unit.blocks == "tiles" else unit.blocks,
            )
            for unit in units
        )
    if optimizer == "adamw8bit":
        units = tuple(dataclasses.replace(unit, blocks="adamw8bit") for unit in units)
    last = rng.random() < 0.04 and ranks > 1 and mesh == "shard" and not quantized
    ignored: tuple[str, ...] = ()
    outside = rng.random() < 0.1 and mesh not in CUTS  # of what else cuts a parameter DDP knows nothing
    if outside and not (precision or quantized or last):  # which say nothing of parameters outside units
        if rng.random() < 0.5:
            ignored = (rng.choice(("norm.weight", ".bias", "layers.0.", "embed.")),)
        # A tied weight needs a unit around both places, and a skippable unit one that is not.
        elif ends != "tied" and len(units) > 1 and not any(unit.skippable for unit in units):
            units = tuple(unit for unit in units if "" not in unit.modules)
    if mixed_offload:
        units = tuple(dataclasses.replace(unit, offload=rng.random() < 0.5) for unit in units)
    known = {name: kind for name, kind in doings.ACTIONS.items() if not kind.departs}
    names = rng.choices(list(known), [kind.weight for kind in known.values()], k=rng.randrange(2, 8))
    if mesh == "hsdp" and rng.random() < 0.3:
        names[rng.randrange(len(names))] = "accumulate_over_replicas"
    if last:
        compiled = ""
        layers = (*layers, "experts")
        units = (*(Unit((f"layers.{index}",)) for index in range(len(layers))), Unit())
        names = [*names[:2], "train", rng.choice([name for name in doings.ACTIONS if name not in known])]
    if uneven:  # a unit is reduced after each forward: a rank whose expert ran in the other has nothing then
        names = ["train" if name in ("two_forwards", "twice_through") else name for name in names]
    if precision == "fp16":  # which has no huge values
        names = ["scaled" if name == "odd_gradient" else name for name in names]
    taken: list[Action] = []
    for name in names:
        kind = doings.ACTIONS[name]
        taken.append((name, *kind.draw(rng)))
        if kind.gradients and rng.random() < 0.8:
            taken.append(("step",))
    beside = [
        *([("state_dict", "assign")] if any(LAYERS[kind].keeps for kind in layers) else []),
        *(
            [("other_blocks", *doings.ACTIONS["other_blocks"].draw(rng))]
            if optimizer == "adamw8bit" and not precision + quantized
            else []
        ),
        *([("route", *doings.ACTIONS["route"].draw(rng))] if optimizer == "muon" else []),
        *([("to_dtype",)] if any(len(unit.modules) > 1 for unit in units) else []),
        *(
            [("reshard_after_backward", False), ("accumulate_hooks",), ("all_reduce_hook",)]
            if mixed_offload
            else []
        ),
        *([("remove_parametrizations", rng.choice(HOW))] if "parametrized" in layers else []),
    ]
    for one in beside:
        if rng.random() < 0.4 and not last:
            taken += [one, ("train",), ("step",)]
    recompute = rng.choices(("", *RECOMPUTES, "part"), (60, 12, 12, 4, 4, 4, 4, 4))[0]
    program = Program(
        seed=seed,
        ranks=ranks,
        mesh=mesh,
        replicas=replicas,
        layers=layers,
        ends=ends,
        width=rng.choice((5, 6, 8)),
        rows=rng.choices(("", "per rank"), (12, 1))[0],
        recompute=recompute,
        compiled=compiled,
        units=units,
        uneven=uneven,
        precision=precision,
        quantized=quantized,
        offload=rng.random() < 0.08,
        transport=rng.choice(("collectives", "peer_memory")) if rng.random() < 0.15 else "",
        ignored=ignored,
        # Other parallelism and subclasses replace parameters, without their hooks.
        hooked=rng.choice(list(doings.HOOKS))
        if rng.random() < 0.06 and mesh not in CUTS and "subclass" not in layers
        else "",
        module_hooks=f"{rng.choice(list(MODULE_HOOKS))}: {rng.choice(PLACES)}" if rng.random() < 0.1 else "",
        optimizer=optimizer,
        # An expert is gathered ahead for a batch that turns out not to choose it: FSDP2 gathers it when it runs.
        counted=rng.random() < 0.3
        and not compiles
        and not any("experts" in m for u in units for m in u.modules),
        actions=tuple(taken),
    )
    for change, when in APART:
        program = dataclasses.replace(program, **(change if when(program) else {}))
    return program


def _mesh(rng: random.Random, ranks: int) -> str:
    if ranks == 4:
        return rng.choice(("shard", "shard", "hsdp", "hsdp", "tp", "ep", "two"))
    return rng.choice(("shard", "shard", "shard", "tp", "ep")) if ranks == 2 else "shard"


def _units(
    rng: random.Random, layers: tuple[str, ...], ends: str, ranks: int, mesh: str, uneven: bool
) -> tuple[Unit, ...]:
    """Some layers, experts, the ends together, and the model, inner ones first."""
    reshard = [None, True, True, False, *([2] if ranks == 4 and mesh not in ("two", "ep") else [])]
    blocks = ["", "", "rows", "tiles", "whole"]

    def unit(*modules: str, skippable: bool = False) -> Unit:
        return Unit(modules, rng.choice(reshard), rng.choice(blocks), skippable)

    units = []
    for index, kind in enumerate(layers):
        skippable = kind == "experts" and (uneven or rng.random() < 0.3)
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

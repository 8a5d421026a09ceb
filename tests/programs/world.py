"""The worlds that actions act on, and the list of all actions.

    @action(weight=2, draw=lambda rng: (rng.randrange(3),))
    def one_layer(w, index): ...

An action is a function of a `World`: a program's model, optimizer and trace on one system. Its arguments are drawn with
the program. On a system that does not shard there are no units, and `w.each` and `w.call` do nothing.
"""

import contextlib
import dataclasses
import importlib
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .layers import LENGTH, ROWS, VOCABULARY
from .models import loss_of
from .module_hooks import modules_at, register

TIMEOUT = 6  # seconds of the process group, where a rank departs from the others' order
OPTIONS = ("set_keep_unsharded_storage", "set_separate_reduce_scatter_group")
OPTIMIZERS = ("block adamw", "adamw8bit", "muon", "shampoo", "soap")  # beside torch's
# How hooks are registered on parameters before they are sharded, and what they do besides noting the parameter's name.
HOOKS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "halves gradients": ("register_hook", lambda grad: grad * 0.5),
    "sees gradients": ("register_post_accumulate_grad_hook", lambda param: None),
}


class Late(AssertionError):
    """An exception came out when the process group's timeout had passed, or nearly."""


@dataclass(frozen=True)
class Kind:
    """An action.

    Attributes:
        run: called with the world and the arguments.
        weight: how often it is drawn.
        draw: its arguments.
        gradients: whether it leaves gradients, so that a step may follow.
        fsdp2: whether FSDP2 has what it needs.
        departs: whether one rank leaves the order of the others.
    """

    run: Callable[..., None]
    weight: float
    draw: Callable[[random.Random], tuple[Any, ...]]
    gradients: bool
    fsdp2: bool
    departs: bool


ACTIONS: dict[str, Kind] = {}


def action(
    weight: float = 1.0,
    draw: Callable[[random.Random], tuple[Any, ...]] = lambda rng: (),
    gradients: bool = False,
    fsdp2: bool = True,
    departs: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function in `ACTIONS`."""

    def enter(run: Callable[..., None]) -> Callable[..., None]:
        ACTIONS[run.__name__] = Kind(run, weight, draw, gradients, fsdp2, departs)
        return run

    return enter


def layer(rng: random.Random) -> tuple[int]:
    """Draw the number of a layer; actions take it modulo the number of layers."""
    return (rng.randrange(3),)


def coin(rng: random.Random) -> tuple[bool]:
    """Draw yes or no."""
    return (rng.random() < 0.5,)


def coins(count: int) -> Callable[[random.Random], tuple[bool, ...]]:
    """Draw several."""
    return lambda rng: tuple(rng.random() < 0.5 for _ in range(count))


class World:
    """A program's model and optimizer on one system, and what it does there.

    Attributes:
        params: parameters as `fully_shard` left them, by name; gradients are theirs.
        trace: what was looked at: a label and a value, the same labels on each system.
        kept: losses whose backward is yet to come.
        calls: parameters whose hooks, registered before they were sharded, have run.
    """

    def __init__(self, program: Any, system: Any, model: Any, optimizer: Callable[[Any], Any]):
        self.program, self.system, self.model = program, system, model
        self.units: list[Any] = []
        self.make_optimizer, self.where = optimizer, "wrap"
        self.trace: list[tuple[str, Any]] = []
        self.kept: list[torch.Tensor] = []
        self.calls: list[str] = []
        self.batches = 0

    def build(self) -> None:
        """Hook parameters and modules, shard the model and make the optimizer."""
        kind, _, place = self.program.module_hooks.partition(": ")
        for module in modules_at(self.model, place) if kind else ():
            register(module, kind, self.program)
        for name, param in self.model.named_parameters() if self.program.hooked else ():
            self.hook(name, param, *HOOKS[self.program.hooked], self.calls)
        self.model.autocast = self.program.precision == "autocast"
        self.units = self.system.wrap(self.model, self.program)
        self.params: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.optimizer = self.make_optimizer(self.named())

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters, frozen ones too, without integers and those that are kept as NF4 codes."""
        return [(name, param) for name, param in self.params.items() if not self.is_fixed(name)]

    def hook(
        self, name: str, param: nn.Parameter, register: str, run: Callable[..., Any], calls: list[str]
    ) -> Any:
        """Register a hook that notes its call; returns the handle, None for a frozen parameter."""

        def called(tensor: torch.Tensor) -> Any:
            calls.append(name)
            return run(tensor)

        return getattr(param, register)(called) if param.requires_grad else None

    def is_codes(self, name: str) -> bool:
        """Whether a parameter is kept as NF4 codes, which are not trained."""
        return self.program.quantized == "nf4" and "frozen.w" in name

    def is_fixed(self, name: str) -> bool:
        """Whether a parameter can be neither scaled nor trained: NF4 codes, integers."""
        return self.is_codes(name) or name.endswith("integers")

    # -- the trace ----------------------------------------------------------------------------------------------------

    def note(self, label: str, value: Any) -> None:
        """Add a tensor's full value, a number or text to the trace."""
        if isinstance(value, torch.Tensor):
            value = self.full(value).detach().clone()
        self.trace.append((f"{self.where}: {label}", value))

    def note_all(self, label: str, tensors: dict[str, Any]) -> None:
        """Note each of some tensors."""
        for name, tensor in tensors.items():
            self.note(f"{label} {name}", tensor)

    def note_gradients(self) -> None:
        """Average gradients where the system does not, and note them."""
        self.system.average(self.params)
        self.note_all("grad of", {name: param.grad for name, param in self.params.items()})

    def round_gradients(self) -> None:
        """Leave 30 binary places of gradients: sums in another order give optimizers the same bits."""
        for param in self.params.values():
            self.round_gradient(param)

    def round_gradient(self, param: nn.Parameter) -> None:
        """Leave 30 binary places of one gradient."""
        if param.grad is not None and not self.program.precision:
            param.grad.mul_(2.0**30).round_().div_(2.0**30)

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's full value; collective."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    # -- computation --------------------------------------------------------------------------------------------------

    @property
    def data_rank(self) -> int:
        """The rank whose batches this one has: ranks of tensor parallelism share them."""
        return dist.get_rank() // 2 if self.program.mesh == "tp" else dist.get_rank()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The next batch of this rank: tokens, targets, and the experts that it runs."""
        self.batches += 1
        common = random.Random(1000 * self.program.seed + self.batches)
        own = random.Random(100_000 * self.program.seed + 10 * self.batches + self.data_rank)
        torch.manual_seed(own.randrange(2**30))
        # Made on the device: with indices in memory of the host a simulated device would make the host wait.
        rows = ROWS + self.data_rank if self.program.rows else ROWS
        tokens, targets = torch.randint(VOCABULARY, (2, rows, LENGTH))
        drawn = own if self.program.uneven else common
        chosen = drawn.choices(range(2), k=drawn.randrange(4))
        return tokens, targets, chosen

    def loss(self, **options: Any) -> torch.Tensor:
        """The loss of the next batch."""
        tokens, targets, chosen = self.batch()
        return loss_of(self.model(tokens, chosen, **options), targets)

    def has_gradients(self) -> bool:
        """Whether any parameter has one."""
        return any(param.grad is not None for param in self.params.values())

    def clear_gradients(self) -> None:
        """Remove all gradients, also those of parameters that the optimizer does not have."""
        for param in self.params.values():
            param.grad = None

    def layer(self, index: int) -> nn.Module:
        """A layer, by a number that may be too large."""
        return self.model.layers[index % len(self.model.layers)]

    def call(self, method: str, *args: Any) -> None:
        """Call a method of the sharded model, or of its outermost units."""
        ahead = [self.model] if self.units else []
        while ahead:
            module = ahead.pop()
            if isinstance(module, self.system.api.FSDPModule):
                getattr(module, method)(*args)
            else:
                ahead += module.children()

    def each(self, method: str, *args: Any) -> None:
        """Call a method of each unit."""
        for unit in self.units:
            getattr(unit, method)(*args)

    def rest(self) -> None:
        """Let modules hold the sharded parameters."""
        self.kept.clear()
        self.each("reshard")

    def same_buffers(self) -> None:
        """Give all ranks the buffers of the first."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def spoil(self) -> None:
        """Lose all weights."""
        with torch.no_grad():
            for _, param in self.named():
                param.mul_(0.0)

    def elsewhere(self, where: str) -> tuple["World", Any]:
        """The program's model and optimizer anew, and the group of its ranks; None: each rank has plain modules.

        Args:
            where: "part": on half of the ranks, or on one; "mesh": on another mesh, if there is one.
        """
        program, system, sharded = self.program, self.system, bool(self.units) and where != "plain"
        ranks, cut = dist.get_world_size(), program.mesh in ("tp", "ep")
        fits = {
            "shard": ranks == 4 or cut,
            "hsdp": ranks == 4,
            "tp": ranks % 2 == 0 and "split" in program.layers,
            "ep": ranks % 2 == 0 and "routed" in program.layers,
        }
        meshes = [mesh for mesh, fit in fits.items() if fit and mesh != program.mesh]
        if not sharded or (cut and where == "part"):
            system, sharded = importlib.import_module("tests.programs.systems").System(), False
        elif where == "part" or not meshes:
            program = dataclasses.replace(program, mesh="part")
        else:
            units = [
                dataclasses.replace(u, reshard=u.reshard if u.reshard != 2 else True) for u in program.units
            ]
            mesh = meshes[program.seed % len(meshes)]
            program = dataclasses.replace(program, mesh=mesh, replicas=False, units=tuple(units))
        world = self.of(program, system)
        cuts: list[Any] = [
            param.device_mesh for param in world.params.values() if hasattr(param, "device_mesh")
        ]
        parts = cuts[0] if program.mesh == "part" else None
        return world, parts.get_group() if parts else dist.group.WORLD if sharded else None

    def of(self, program: Any, system: Any = None) -> "World":
        """A world of another program; parameters of the same names are trained or frozen as they are here."""
        torch.manual_seed(self.program.seed)
        model = type(self.model)(program.layers, program.width, program.ends, program.recompute)
        for name, param in model.named_parameters():
            if name in self.params:
                param.requires_grad_(self.params[name].requires_grad)
        optimizer: Callable[[Any], Any] = lambda named: of_groups(self.optimizer, dict(named))  # noqa: E731
        world = World(program, system or self.system, model, optimizer)
        world.build()
        return world

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder that all ranks see, of this action."""
        paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(paths)
        yield Path(paths[0])
        dist.barrier()
        if dist.get_rank() == 0:
            for path in sorted(Path(paths[0]).rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            Path(paths[0]).rmdir()


def local_of(tensor: Any) -> torch.Tensor:
    """A tensor, of a distributed one this rank's."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def made_anew(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same groups and states."""
    groups = optimizer.param_groups
    named = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    other = of_groups(optimizer, dict(named))
    other.load_state_dict(optimizer.state_dict())
    return other


def of_groups(optimizer: torch.optim.Optimizer, params: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer without states, of the same groups of these parameters."""
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        group["params"] = [(name, params[name]) for name in group.pop("param_names") if name in params]
    kind: Callable[[Any], torch.optim.Optimizer] = type(optimizer)
    return kind([group for group in groups if group["params"]])

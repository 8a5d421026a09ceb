"""The length of a step with our order of streams and with FSDP2's, from durations of kernels and collectives.

python -m tools.overlap

Ours is the runtime itself on a layer whose streams are clocks: a kernel or collective adds its duration to the stream
that is current, an event takes that stream's time, and a stream that waits for an event is not earlier. FSDP2 cannot
run there: `fsdp2` queues what torch 2.13's FSDP2 queues, with the same durations of the same model.

Durations: products by flops, all else by bytes written; collectives by the bytes that a rank receives, one after
another on each communicator. Memory and the host take no time. *Exposed* is the length without the computation's own.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbuffer import Collectives
from fsdp_runtime import fully_shard
from ragged_shard.device import StreamLayer, use_device_layer
from ragged_shard.testing import rank_mesh, simulated_ranks

RANKS, TOKENS, WIDTH, BLOCKS = 8, 256, 32, 8
MEMORY = 200.0  # flops that a device does in the time in which it writes one byte
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@dataclass(eq=False)
class Stream:
    """A queue: when its last kernel ends, and how long its kernels take in all."""

    time: float = 0.0
    busy: float = 0.0

    def wait_event(self, event: "Event") -> None:
        """Start nothing before the event."""
        self.time = max(self.time, event.time)

    def spend(self, duration: float) -> None:
        """Queue a kernel."""
        self.time, self.busy = self.time + duration, self.busy + duration


@dataclass(eq=False)
class Event:
    """The end of what a stream had queued."""

    time: float = 0.0

    def record(self, stream: Stream) -> None:
        """Take the stream's time."""
        self.time = stream.time

    def synchronize(self) -> None:
        """The host takes no time."""


class Clocks(StreamLayer):
    """A device of clocks on the CPU. A context: inside, it is the layer of the CPU, and kernels take time.

    Attributes:
        network: duration of a byte received.
        compute: the default stream.
        communicators: when each process group has done its last collective.
    """

    capturing: bool = False

    def __init__(self, network: float) -> None:
        super().__init__(torch.device("cpu"))
        self.network, self.compute = network, Stream()
        self._current = self.compute
        self.communicators: dict[str, float] = {}

    def new_stream(self, priority: int = 0) -> Stream:
        """A new queue."""
        return Stream()

    def current_stream(self) -> Stream:
        """The queue in use."""
        return self._current

    @contextlib.contextmanager
    def _use(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def _new_event(self) -> Event:
        return Event()

    def send(self, communicator: str, nbytes: float) -> None:
        """Queue a collective on the current stream, behind the communicator's last one."""
        stream = self._current
        stream.time = max(stream.time, self.communicators.get(communicator, 0.0))
        stream.spend(nbytes * self.network)
        self.communicators[communicator] = stream.time


class Kernels(TorchDispatchMode):
    """Lets the current stream spend the durations of kernels."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self._clocks = clocks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in PRODUCTS:
            a, b = args[-2], args[-1]
            duration = 2.0 * a.numel() * b.shape[-1]
        elif any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return result  # a view
        else:
            written = result if result is not None else args[0]
            duration = MEMORY * sum(t.nbytes for t in tree_leaves(written) if isinstance(t, torch.Tensor))
        self._clocks.current_stream().spend(duration)
        return result


class Timed(Collectives):
    """Collectives that take time; their values are not needed."""

    clocks: Clocks

    def all_gather(self, pairs: Any, label: str) -> None:
        """Receive the other ranks' slices."""
        self._spend(sum(receive.nbytes - send.nbytes for receive, send in pairs))

    def reduce_scatter(self, pairs: Any, op: Any, label: str) -> None:
        """Receive as many slices of others."""
        self._spend(sum(send.nbytes - receive.nbytes for receive, send in pairs))

    def all_reduce(self, tensors: Any, op: Any, label: str) -> None:
        """Receive everything twice, in slices."""
        ranks = self.group().size()
        self._spend(sum(t.nbytes for t in tensors) * 2 * (ranks - 1) / ranks)

    def _spend(self, nbytes: float) -> None:
        self.clocks.send(self.group().group_name, nbytes)


class Block(nn.Module):
    """Two products and a residual connection; of several experts the first is used."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, hidden) / WIDTH)
        self.down = nn.Parameter(torch.randn(experts, hidden, WIDTH) / hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, WIDTH) -> the same."""
        return x + torch.mm(torch.relu(torch.mm(x, self.up[0])), self.down[0])


def model_of(experts: bool) -> nn.Module:
    """Blocks between a projection and a head; with `experts` every second block is four times as large."""
    torch.manual_seed(0)
    blocks = [Block(4 * WIDTH, 4 if experts and i % 2 else 1) for i in range(BLOCKS)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 16 * WIDTH))


@dataclass
class Case:
    """A model on a mesh. `ratio`: how long a block's gather takes, in forwards of the first block."""

    name: str
    ratio: float
    experts: bool = False
    replicas: int = 1


CASES = [
    Case(f"{name}, gathers of {ratio:g} forwards", ratio, **options)
    for name, options in (
        ("dense", {}),
        ("HSDP 2 x 4", {"replicas": 2}),
        ("unequal units", {"experts": True}),
    )
    for ratio in (0.5, 1.0, 2.0)
]


@dataclass
class Unit:
    """Durations of a unit's forward and backward, and bytes of its parameters."""

    forward: float = 0.0
    backward: float = 0.0
    nbytes: int = 0


@dataclass
class Step:
    """A step's length, and what the computation takes of it without sharding."""

    length: float
    compute: float
    exposed: float = field(init=False)

    def __post_init__(self) -> None:
        self.exposed = self.length - self.compute


def units_of(case: Case) -> tuple[Unit, list[Unit]]:
    """Durations of the root (its head and loss) and of the blocks, of one process."""
    clocks, model = Clocks(0.0), model_of(case.experts)
    modules: list[Any] = list(model.children())
    first, *blocks, head = modules
    root, units, stream = Unit(), [Unit() for _ in blocks], clocks.compute

    def timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        begin = stream.time
        result = call(*args)
        return result, stream.time - begin

    with use_device_layer(clocks), Kernels(clocks):
        x, root.forward = timed(first, torch.randn(TOKENS, WIDTH))
        inputs = []
        for unit, block in zip(units, blocks, strict=True):
            inputs.append(x.detach().requires_grad_())
            x, unit.forward = timed(block, inputs[-1])
            unit.backward = timed(x.backward, torch.ones_like(x))[1]
        last = x.detach().requires_grad_()
        loss, tail = timed(lambda x: head(x).square().mean(), last)
        root.forward += tail
        root.backward = timed(loss.backward)[1]
    for unit, parts in ((root, [first, head]), *((u, [b]) for u, b in zip(units, blocks, strict=True))):
        unit.nbytes = sum(p.nbytes for part in parts for p in part.parameters())
    return root, units


def network_of(case: Case) -> float:
    """Duration of a byte received, so that gathers of the first block take `ratio` forwards."""
    _, (first, *_) = units_of(case)
    shards = RANKS // case.replicas
    return case.ratio * first.forward / (first.nbytes * (shards - 1) / shards)


def ours(case: Case) -> Step:
    """The third step of the runtime."""
    clocks = Clocks(network_of(case))
    transport = type("Timed", (Timed,), {"clocks": clocks})
    with use_device_layer(clocks), simulated_ranks(RANKS, rank=1), Kernels(clocks):
        if case.replicas > 1:
            mesh = rank_mesh(case.replicas, RANKS // case.replicas, names=("replicate", "shard"))
        else:
            mesh = rank_mesh(RANKS)
        model: Any = model_of(case.experts)
        options: dict[str, Any] = {"mesh": mesh, "transport": transport}
        for block in list(model)[1:-1]:
            fully_shard(block, **options)
        fully_shard(model, **options)
        begin, x = 0.0, torch.randn(TOKENS, WIDTH)
        for _ in range(3):
            begin = clocks.compute.time
            model(x).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad = None
    root, units = units_of(case)
    return Step(clocks.compute.time - begin, sum(u.forward + u.backward for u in (root, *units)))


def fsdp2(case: Case) -> Step:
    """What FSDP2 queues in a step: https://github.com/pytorch/pytorch/tree/main/torch/distributed/fsdp/_fully_shard."""
    clocks = Clocks(network_of(case))
    root, units = units_of(case)
    copy_in, gather, reduce, replicate = (clocks.new_stream() for _ in range(4))
    shards = RANKS // case.replicas
    free = clocks.record()  # after the last copy-out: gathers use one staging buffer

    def all_gather(unit: Unit) -> Any:
        with clocks.on(copy_in, (free,)):
            clocks.current_stream().spend(MEMORY * unit.nbytes / shards)
            ready = clocks.record()
        with clocks.on(gather, (ready,)):
            clocks.send("shard", unit.nbytes * (shards - 1) / shards)
            return clocks.record()

    def copy_out(unit: Unit, gathered: Any) -> None:
        nonlocal free
        clocks.wait(gathered)
        clocks.compute.spend(MEMORY * unit.nbytes)
        free = clocks.record()

    begin = clocks.record().time
    copy_out(root, all_gather(root))
    under_way = all_gather(units[0])
    for unit, following in zip(units, [*units[1:], None], strict=True):
        copy_out(unit, under_way)
        under_way = (
            all_gather(following) if following else None
        )  # the host runs ahead: queued before the forward
        clocks.compute.spend(unit.forward)
    clocks.compute.spend(root.forward)
    clocks.compute.spend(root.backward)
    under_way, reduced, last = all_gather(units[-1]), None, None
    for unit, following in zip(units[::-1], [*units[-2::-1], None], strict=True):
        copy_out(unit, under_way)
        under_way = all_gather(following) if following else None
        clocks.compute.spend(unit.backward)
        clocks.wait(reduced)  # the input of the reduction before is freed
        reduced, last = _reduce(clocks, unit, shards, case.replicas, reduce, replicate)
    clocks.wait(reduced)
    reduced, last = _reduce(clocks, root, shards, case.replicas, reduce, replicate)
    clocks.wait(last)
    return Step(clocks.compute.time - begin, sum(u.forward + u.backward for u in (root, *units)))


def _reduce(
    clocks: Clocks, unit: Unit, shards: int, replicas: int, reduce: Stream, replicate: Stream
) -> tuple[Any, Any]:
    """Copy gradients in and reduce them; the events after the reduce-scatter, and after all."""
    clocks.compute.spend(MEMORY * unit.nbytes)
    with clocks.on(reduce):
        clocks.send("shard", unit.nbytes * (shards - 1) / shards)
        done = clocks.record()
    if replicas == 1:
        return done, done
    with clocks.on(replicate, (done,)):
        clocks.send("replicate", unit.nbytes / shards * 2 * (replicas - 1) / replicas)
        return done, clocks.record()


def main() -> None:
    """Print the table."""
    print("| model | computation | FSDP2's step | exposed | our step | exposed | of FSDP2's step |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES:
        theirs, own = fsdp2(case), ours(case)
        unit = theirs.compute / 100
        figures = (100.0, theirs.length / unit, theirs.exposed / unit, own.length / unit, own.exposed / unit)
        cells = " | ".join(f"{figure:.1f}" for figure in figures)
        print(f"| {case.name} | {cells} | {own.length / theirs.length:.2f} |")


if __name__ == "__main__":
    main()

"""SIMULATION: one process that stands for one rank of many. Nothing is sent; the other ranks do not exist.

    compute stream   [ block 1 ][ block 2 ][ block 3 ]
    own stream       [== gather 2 ==][== gather 3 ==]        a delay of latency + bytes / bandwidth, then a real copy

Every other rank is taken to hold this one's values: a gather repeats this rank's input, a sum is `world_size` times
its own. So the right number of bytes is written to the right memory, on a stream of the group's own as with NCCL,
and memory, streams and overlap are the tested code's. Values, and so losses, mean nothing. On a CPU there
are no streams, and delays are simulated on CUDA only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ragged_shard import _torch_compat as compat
from ragged_shard.device import SIMULATED, DeviceLayer, device_layer, is_cpu

Collectives = Literal["copy", "skip"]
_BACKEND = "simulated"
_ProcessGroup: Any = dist.ProcessGroup  # its stubs do not allow for methods with several names


@dataclass(frozen=True)
class Network:
    """The time that a collective takes on a CUDA device."""

    # bytes per second into each rank; None: no delay, and `latency` is ignored
    bandwidth: float | None = None
    latency: float = 0.0  # seconds per collective

    def seconds(self, received: float) -> float:
        """Duration, in seconds, of a collective in which this rank receives `nbytes`."""
        return 0.0 if self.bandwidth is None else self.latency + received / self.bandwidth


@dataclass
class Simulation:
    """The simulated world that `simulated_ranks` yields."""

    world_size: int  # ranks simulated
    rank: int  # the one that this process stands for
    collectives: Collectives  # as for `simulated_ranks`
    network: Network  # may be exchanged at any time
    # the collectives so far: the process group's name, and the bytes received
    calls: list[tuple[str, float]] = field(default_factory=list)
    _streams: dict[DeviceLayer, tuple[Any, float]] = field(default_factory=dict, repr=False)

    def stream(self, layer: DeviceLayer) -> tuple[Any, float]:
        """The stream that collectives run on, and how many of the cycles that it can be kept busy for a second has."""
        if layer not in self._streams:
            cycles = 0.0 if compat.sleeper(layer.device) is None else _cycles_per_second(layer)
            self._streams[layer] = (layer.new_stream(), cycles)
        return self._streams[layer]


class SimulatedWork(dist.Work):
    """A collective of a simulated group that writes `results`; complete when its event on a layer is, or at once.

    It references `uses` until it was waited for, as NCCL's work does its memory.
    """

    def __init__(
        self, results: Sequence[Tensor], layer: DeviceLayer | None = None, event: Any = None, uses: Any = None
    ) -> None:
        super().__init__()
        self._layer, self._event, self._uses = layer, event, uses
        # Made on the collective's stream, so that a wait for the future is a wait for that stream.
        on_device = layer is not None and not is_cpu(layer.device)
        devices: Any = [results[0].device] if on_device else None
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        self._future.set_result(list(results))

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the collective."""
        if self._layer is not None:
            self._layer.wait(self._event)
            self._uses = None
        return True

    def is_completed(self) -> bool:
        """Whether the copies are done."""
        return self._layer is None or self._layer.has_completed(self._event)

    def get_future(self) -> Any:
        """A future of the results."""
        return self._future


class SimulatedGroup(_ProcessGroup):
    """A process group of which only this rank exists. Made by `simulated_ranks`."""

    def __init__(self, rank: int, size: int, simulation: Simulation) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._simulation = rank, size, simulation
        self._name = ""

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Name of the backend."""
        return _BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find the group."""
        return self._name

    pg_name = group_name

    def _run(self, results: Sequence[Tensor], received: float, move: Callable[[], None]) -> SimulatedWork:
        """Write the results, or not, as the simulation's `collectives` says."""
        simulation = self._simulation
        simulation.calls.append((self._name, received))
        if simulation.collectives == "skip":
            return SimulatedWork(results)
        layer = device_layer(results[0].device) if results and not results[0].is_meta else None
        if layer is None or not layer.asynchronous:
            move()
            return SimulatedWork(results)
        stream, cycles_per_second = simulation.stream(layer)
        with layer.on(stream):
            if cycles := int(simulation.network.seconds(received) * cycles_per_second):
                compat.sleeper(layer.device)(cycles)
            move()
            return SimulatedWork(results, layer, layer.record(), uses=move)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Repeat each input in its output."""

        def move() -> None:
            for output, sent in zip(outputs, inputs, strict=True):
                ranks = output.view(self._size, -1)
                ranks[: self._rank].copy_(sent.view(1, -1))
                ranks[self._rank + 1 :].copy_(sent.view(1, -1))
                if sent.data_ptr() != ranks[self._rank].data_ptr():
                    ranks[self._rank].copy_(sent.view(-1))

        return self._run(outputs, sum(t.nbytes for t in inputs) * (self._size - 1), move)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Reduce this rank's slice of each input with itself."""
        factor = self._factor(opts)

        def move() -> None:
            for output, sent in zip(outputs, inputs, strict=True):
                own = sent.view(self._size, -1)[self._rank].view_as(output)
                output.copy_(own if factor == 1 else own * factor)

        return self._run(outputs, sum(t.nbytes for t in inputs) * (self._size - 1) / self._size, move)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        """Reduce each tensor with itself, in place."""
        factor = self._factor(opts)

        def move() -> None:
            for tensor in tensors:
                if factor == 1:
                    _write(tensor)
                else:
                    tensor.mul_(factor)

        return self._run(tensors, 2 * sum(t.nbytes for t in tensors) * (self._size - 1) / self._size, move)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Copy each input into all its outputs."""

        def move() -> None:
            for gathered, sent in zip(outputs, inputs, strict=True):
                for tensor in gathered:
                    if tensor.data_ptr() != sent.data_ptr():
                        tensor.copy_(sent)

        return self._run(
            [t for g in outputs for t in g], sum(t.nbytes for t in inputs) * (self._size - 1), move
        )

    def alltoall_base(
        self, output: Any, sent: Any, output_splits: Any = (), input_splits: Any = (), opts: Any = None
    ) -> SimulatedWork:
        """Fill the output with this rank's input, cut off or repeated to the output's size."""
        own = output_splits[self._rank] / max(sum(output_splits), 1) if output_splits else 1 / self._size

        def move() -> None:
            if sent.numel():
                repeats = -(-output.numel() // sent.numel())
                output.view(-1).copy_(sent.reshape(-1).repeat(repeats)[: output.numel()])

        return self._run([output], output.nbytes - round(output.nbytes * own), move)

    def broadcast(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        """Leave the tensors as they are: the source has the same."""
        received = [] if getattr(opts, "rootRank", 0) == self._rank else tensors

        def move() -> None:
            for tensor in received:
                _write(tensor)

        return self._run(tensors, sum(t.nbytes for t in received), move)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Return at once."""
        return self._run([], 0, lambda: None)

    def _factor(self, opts: Any) -> float:
        """The factor by which reducing `size` equal tensors multiplies one of them."""
        op: Any = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        if op == dist.ReduceOp.SUM:
            return self._size
        if op == dist.ReduceOp.AVG or op == dist.ReduceOp.MIN or op == dist.ReduceOp.MAX:
            return 1
        if op == dist.ReduceOp.PREMUL_SUM:
            return self._size * float(op.__getstate__()[1])
        raise NotImplementedError("only reductions with SUM, AVG, MIN, MAX and PREMUL_SUM are simulated")

    def all_gather_single(self, output: Any, sent: Any, opts: Any = None) -> SimulatedWork:
        """Repeat the input in the output."""
        return self.all_gather_single_coalesced([output], [sent], opts)

    def reduce_scatter_single(self, output: Any, sent: Any, opts: Any = None) -> SimulatedWork:
        """Reduce this rank's slice of the input with itself."""
        return self.reduce_scatter_single_coalesced([output], [sent], opts)

    # The same under the names of other torch releases and of single calls.
    allreduce = allreduce_coalesced
    all_to_all_single = alltoall_base
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _write(tensor: Tensor) -> None:
    """Register a write with the simulated device. Costs nothing: torch copies no tensor to itself."""
    tensor.copy_(tensor)


_active: Simulation | None = None


def _create(store: Any, rank: int, size: int, timeout: Any) -> SimulatedGroup:
    assert _active is not None
    return SimulatedGroup(rank, size, _active)


@contextmanager
def simulated_ranks(
    world_size: int, *, rank: int = 0, collectives: Collectives = "copy", network: Network | None = None
) -> Iterator[Simulation]:
    """Inside, torch.distributed is initialised with `world_size` ranks, of which this process is `rank`.

    The others do not exist, and nothing is sent; see the module's docstring for what collectives do. Works for tensors
    on CPU, CUDA and meta devices. Meshes and further process groups may be made inside.

    Args:
        world_size: number of ranks.
        rank: the rank that this process stands for.
        collectives: "copy" writes results as if every other rank held this one's values; "skip" returns at once
            and leaves results as they are.
        network: how long collectives take on a CUDA device. None: as long as the copies.

    Raises:
        ValueError: an unknown kind of collectives, or a rank outside the world size.
        RuntimeError: torch.distributed is already initialised in this process.
    """
    global _active
    if collectives not in ("copy", "skip") or not 0 <= rank < world_size:
        raise ValueError(
            f"simulated_ranks({world_size}, rank={rank}, collectives={collectives!r}): expected a rank below the world "
            "size, and collectives 'copy' or 'skip'"
        )
    if dist.is_initialized():
        raise RuntimeError("simulated_ranks initialises torch.distributed, which is initialised already")
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, devices=SIMULATED)
    _active = Simulation(world_size, rank, collectives, network or Network())
    dist.init_process_group(_BACKEND, rank=rank, world_size=world_size, store=HashStore())
    try:
        yield _active
    finally:
        dist.destroy_process_group()
        compat.forget_meshes()
        _active = None


def _cycles_per_second(layer: DeviceLayer) -> float:
    """How many cycles a second has on a device, measured."""
    sleep = compat.sleeper(layer.device)
    start, end = (torch.Event(layer.device, enable_timing=True) for _ in range(2))
    cycles = 50_000_000
    stream = layer.current_stream()
    with layer.on(stream, ()):
        sleep(1000)
        start.record(stream)
        sleep(cycles)
        end.record(stream)
    layer.synchronize()
    return float(cycles / (start.elapsed_time(end) / 1e3))

"""SIMULATION: one process that stands for rank 0 of many; the wire is modelled, everything else is real.

    compute stream   [ block 1 ][ block 2 ][ block 3 ]
    wire stream      [== gather 2 ==][== gather 3 ==]        a delay of latency + bytes / bandwidth, then a real copy

Every other rank is taken to hold what this one holds: a gather repeats this rank's shard, a sum is `size` times its own
part. So the right number of bytes lands in the right memory, on a stream of the group's own as NCCL's does, and
overlap and allocation are the system's own. Losses mean nothing here. The delay holds one thread block of one
multiprocessor; the copy's own time comes on top of it. On a CPU there are no streams and the delay is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Wire:
    """A network of rings: what one rank receives, at so many bytes a second, after so many seconds a launch.

    Attributes:
        bandwidth: bytes a second into each rank; None: no delay at all.
        latency: seconds a launch.
    """

    bandwidth: float | None
    latency: float = 0.0

    def seconds(self, received: float) -> float:
        """How long a collective is on the wire."""
        return 0.0 if self.bandwidth is None else self.latency + received / self.bandwidth


class SimulatedWork(dist.Work):
    """Done when its event is."""

    def __init__(self, event: Any, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._event = event
        devices = [results[0].device] if event is not None and results else None
        # Filled on the wire's stream, which is the current one: whoever waits for it waits for the copy.
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        self._future.set_result(results)

    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()


class SimulatedGroup(dist.ProcessGroup):
    """The collectives that the systems under comparison launch.

    Attributes:
        wire: of all groups; may be exchanged between steps.
    """

    wire = Wire(None)

    def __init__(self, rank: int, size: int, device: str) -> None:
        super().__init__(rank, size)
        self._size = size
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._cycles = _cycles_per_second() if device == "cuda" else 0.0

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "simulated"

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _run(self, received: float, move: Callable[[], None], results: Any) -> SimulatedWork:
        if self._stream is None:
            move()
            return SimulatedWork(None, list(results))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if cycles := int(self.wire.seconds(received) * self._cycles):
                torch.cuda._sleep(cycles)
            move()
            event = torch.cuda.Event()
            event.record()
            return SimulatedWork(event, list(results))

    # -- gathers and reductions --

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        pairs = list(zip(outputs, inputs, strict=True))

        def move() -> None:
            for receive, send in pairs:
                parts = receive.view(self._size, -1)
                parts[1:].copy_(send.view(1, -1))
                if send.data_ptr() != receive.data_ptr():
                    parts[0].copy_(send.view(-1))

        return self._run(sum(s.nbytes * (self._size - 1) for _, s in pairs), move, outputs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        pairs = list(zip(outputs, inputs, strict=True))
        averaged = opts is not None and opts.reduceOp == dist.ReduceOp.AVG

        def move() -> None:
            for receive, send in pairs:
                own = send.view(self._size, -1)[0].view_as(receive)
                receive.copy_(own if averaged else own * self._size)

        return self._run(sum(s.nbytes * (self._size - 1) / self._size for _, s in pairs), move, outputs)

    def all_gather_single(self, output: Any, sent: Any, opts: Any = None) -> SimulatedWork:
        return self.all_gather_single_coalesced([output], [sent], opts)

    def reduce_scatter_single(self, output: Any, sent: Any, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter_single_coalesced([output], [sent], opts)

    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        scaled = op == dist.ReduceOp.SUM

        def move() -> None:
            for tensor in tensors:
                if scaled:
                    tensor.mul_(self._size)

        return self._run(sum(2 * t.nbytes * (self._size - 1) / self._size for t in tensors), move, tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        return self._run(0.0, lambda: None, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        def move() -> None:
            for receive, send in zip(outputs, inputs, strict=True):
                for tensor in receive:
                    tensor.copy_(send)

        return self._run(sum(t.nbytes * (self._size - 1) for t in inputs), move, inputs)

    def alltoall_base(
        self, output: Any, sent: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> SimulatedWork:
        def move() -> None:
            length = min(output.numel(), sent.numel())
            output.view(-1)[:length].copy_(sent.view(-1)[:length])

        return self._run(output.nbytes * (self._size - 1) / self._size, move, [output])

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return SimulatedWork(None, [])

    # The same under the names of other torch releases.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    all_to_all_single = alltoall_base


def _cycles_per_second() -> float:
    """What `torch.cuda._sleep` takes for one second on this device, measured."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 50_000_000
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / (start.elapsed_time(end) / 1e3)


def connect(size: int, device: str, wire: Wire) -> None:
    """Make a simulated group the default one, this process its rank 0."""
    name = f"simulated_{device}"

    def create(store: Any, rank: int, ranks: int, timeout: Any) -> SimulatedGroup:
        return SimulatedGroup(rank, ranks, device)

    SimulatedGroup.wire = wire
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, create, devices=[device])
    dist.init_process_group(name, rank=0, world_size=size, store=dist.HashStore())

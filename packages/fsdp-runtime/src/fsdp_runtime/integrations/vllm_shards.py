"""vLLM: engines for its weight transfer that move shards as they lie, without whole tensors on a trainer's rank.

Trainer ranks list the boxes that they hold, workers those that they want; all make one plan, and `send_weights` sends
parts of boxes from views of the shards, point to point (gloo on a CPU, NCCL on CUDA). Register both under one name:

    WeightTransferTrainerFactory.register_engine("shards", trainer_engine())
    WeightTransferEngineFactory.register_engine("shards", worker_engine())

Written for vLLM 0.33.0, with whose base classes it was tried; not in a server, and not with NCCL.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from ragged_shard import Box

from ..checkpoint.local_shards import Link


@dataclass(kw_only=True)
class ShardsInfo:
    """Where trainer ranks and workers connect; `rank` is the trainer's, whose tensors are on `device`."""

    backend: ClassVar[str] = "shards"  # the name that both are registered under
    master_address: str
    master_port: int
    trainers: int
    workers: int
    device: str
    timeout_s: float = 600.0
    rank: int = 0

    def link(self, member: int, device: torch.device) -> Link:
        """The connection of one of them; trainer ranks come first."""
        address = self.master_address, self.master_port
        return Link(address, self.trainers, self.workers, member, device, self.timeout_s)


def trainer_engine() -> type:
    """The trainer's side, whose source is a `weight_source`: sends each element once to each worker that wants it."""
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")

    class ShardsTrainerEngine(base.TrainerWeightTransferEngine):
        init_info_cls = ShardsInfo

        @classmethod
        def trainer_init(cls, config: Any, init_info: ShardsInfo, *, client: Any, source: Any) -> Any:
            engine = cls(config, client=client, source=source, is_sender=init_info.rank == 0)
            with engine.while_workers("init_weight_transfer_engine", asdict(init_info)):
                engine.link = init_info.link(init_info.rank, torch.device(init_info.device))
                engine.link.hold(source.local_shards())
            return engine

        @contextmanager
        def while_workers(self, method: str, *args: Any) -> Iterator[None]:
            """Inside, a call of the sender's client is under way on a thread."""
            pool = ThreadPoolExecutor(1)
            call = pool.submit(getattr(self.client, method) if self.is_sender else lambda *_: None, *args)
            try:
                yield
            except Exception:
                if call.done():
                    call.result()  # the cause
                raise
            finally:
                pool.shutdown(wait=False)
            call.result()

        def send_weights(self) -> None:
            if self.is_sender:
                self.client.start_weight_update()
            with self.while_workers("update_weights", {}):
                self.sent_bytes = self.link.send(self.source.local_shards())
            if self.is_sender:
                self.client.finish_weight_update()

    return ShardsTrainerEngine


def worker_engine() -> type:
    """A worker's side; subclass it to receive parts of tensors: `wanted` and `load`."""
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")

    class ShardsEngine(base.WeightTransferEngine):
        init_info_cls, update_info_cls = ShardsInfo, dict  # the plan says everything about an update

        def init_transfer_engine(self, init_info: ShardsInfo) -> None:
            own = self.parallel_config
            worker = own.data_parallel_index * own.world_size + own.rank
            self.link = init_info.link(init_info.trainers + worker, self.device)
            self.link.want(self.wanted)

        def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Sequence[Box]]:
            """The boxes that this worker wants, by name: all of every tensor."""
            return {name: [Box((0,) * len(shape), shape)] for name, shape in shapes.items()}

        def load(self, name: str, box: Box, values: torch.Tensor) -> None:
            """Take the values of a wanted box: vLLM's loaders take whole tensors."""
            self.model.load_weights([(name, values)])

        def start_weight_update(self) -> None: ...
        def finish_weight_update(self) -> None: ...

        def receive_weights(self, update_info: Any) -> None:
            for name, box, values in self.link.receive():
                self.load(name, box, values)

        def shutdown(self) -> None:
            del self.link

    return ShardsEngine

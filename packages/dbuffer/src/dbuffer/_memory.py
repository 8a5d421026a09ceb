"""All the memory of one buffer, and whether a collective is using it."""

from typing import Any

from ._spec import BufferSpec
from .memory.gathered import GatheredMemory, NeighborSlices
from .memory.geometry import geometry_of
from .memory.recycler import Recycler, hold_forever
from .memory.scratch import Scratch
from .memory.shard import ShardMemory
from .wire import BlocksAtRest, CodedShard


class BufferMemory:
    """Shard and gathered memory of one buffer; what collectives work on.

    Attributes:
        name: of the group, for errors.
        spec: what the buffer is.
        geometry: where its tensors lie.
        shard, gathered: the memory.
        coded: whether the shard is codes and scales.
        aliased: whether both are the same memory.
        recycler: where the gathered memory comes from.
        neighbor: what `shrink` kept, or None.
        scratch: what a reduction under way uses in addition.
        reductions: how many were encoded; stochastic rounding depends on it.
        in_flight: the handle of a collective that has not been waited for, or None.
        condemned: whether something may still use the shard, because a collective on it failed.
    """

    def __init__(self, name: str, spec: BufferSpec, recycler: Recycler) -> None:
        self.name = name
        self.spec = spec
        self.recycler = recycler
        self.geometry = geometry_of(spec.layout, spec.view.rank)
        self.coded = isinstance(spec.wire, BlocksAtRest)
        if isinstance(spec.wire, BlocksAtRest):
            self.shard: ShardMemory = CodedShard(
                self.geometry, spec.wire.format, spec.dtype, spec.shard_device
            )
        else:
            pinned_for = spec.layer if spec.pin_memory else None
            self.shard = ShardMemory(self.geometry, spec.dtype, spec.shard_device, pinned_for)
        self.aliased = spec.alias and not spec.casts and not spec.offloaded and spec.view.size == 1
        self.gathered = GatheredMemory(
            self.geometry, spec.full_dtype, recycler, self.shard.flats if self.aliased else None
        )
        self.encoder = spec.wire.encoder(self.geometry, self.gathered, recycler)
        self.neighbor: NeighborSlices | None = None
        self.scratch: list[Scratch] = []
        self.reductions = 0
        self.in_flight: Any = None
        self.condemned = False

    def condemn(self) -> None:
        """Keep this memory out of use for good: a failed collective may still write there."""
        self.condemned = True
        self.gathered.condemn()
        hold_forever(self.shard.flats)
        self.encoder.condemn()
        for one in self.scratch:
            one.condemn()
        if self.neighbor is not None:
            hold_forever(self.neighbor.flats)

    # -- checks -----------------------------------------------------------------------------------------------------

    def check_gathered(self, what: str) -> None:
        """Raise RuntimeError where there is no gathered memory."""
        if not self.gathered.present:
            raise RuntimeError(f"{self.name}: {what} after release; call all_gather or materialize first")

    def check_gathered_values(self, what: str) -> None:
        """Raise where there is no gathered memory, or tensors are gathered as codes."""
        self.check_gathered(what)
        if not self.gathered.flats:
            raise ValueError(
                f"{self.name}: {what} does not apply to tensors that are gathered as codes; read them through `views`"
            )

    def check_shard(self, what: str) -> None:
        """Raise RuntimeError where the shard was given away."""
        if not self.shard.flats:
            raise RuntimeError(f"{self.name}: {what} after give_shard; call new_shard first")

    def check_values(self, what: str) -> None:
        """Raise ValueError where the shard holds codes."""
        if self.coded:
            raise ValueError(
                f"{self.name}: {what} does not apply to codes at rest; copy values into `local_views`, or use load_full"
            )

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError where a collective is under way."""
        if self.in_flight is not None:
            raise RuntimeError(
                f"{self.name}: {what} while a collective is under way; call wait() on its handle first"
            )

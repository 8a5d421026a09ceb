"""Gathers of a group whose parameters are tensor subclasses with FSDP2's all-gather extensions.

shard    --fsdp_pre_all_gather-->   tensors of any dtype, and metadata that stays on the rank
tensors  |  rows of rank 0  |  rank 1  |  rank 2  |      a plane for each, all of them in the unit's coalesced call
planes   --fsdp_post_all_gather-->  the unsharded parameter; later gathers give it as `out=`

Each parameter is a separate segment, cut between its first dimension's slices: every rank holds the same number
of them, except the last ones, as extensions written for FSDP2 expect. So gathered data are contiguous without a copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dbuffer import Encoder, Geometry, Recycler, Scratch, WireForm, hold_forever
from ragged_shard.device import DeviceLayer
from ragged_shard.dist import raise_on_all_ranks

from .._plan.mesh import DataMesh
from .._plan.param import POST, PRE, MakeHook, ManagedParam, local_of

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Described = list[list[tuple[tuple[int, ...], str]]]  # shape and dtype of each tensor of each parameter


@dataclass(frozen=True)
class _Plane:
    """The place of one of a parameter's tensors: `rows` of each rank in their order, of which the first are used."""

    # shape, dtype: of what `fsdp_pre_all_gather` returns on this rank
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: int  # sent by each rank, the same number on every rank
    own: int  # how many of this rank's rows are used; the others are padding
    memory: Scratch  # of all ranks' rows
    output: torch.Tensor  # what `fsdp_post_all_gather` gets: the rows that are used


class _Member:
    """One parameter of the group."""

    def __init__(self, param: ManagedParam[Any], rows: tuple[int, ...]) -> None:
        self.param = param
        self.extension: Any = param.wrapper  # an `Extension`
        self.rows = rows
        self.metadata: Any = None  # from the start of a gather until it is used
        self.planes: list[_Plane] = []  # sent memory; empty before the first gather
        self.unsharded: torch.Tensor | None = None  # result of the first `fsdp_post_all_gather`
        # storages in it that are not planes: freed with them
        self.made: list[tuple[torch.UntypedStorage, int]] = []


class SubclassGather(Encoder, WireForm):
    """The wire form of one group of such parameters, and its encoder. Takes the place of the gathered memory.

    Pre and post are called in every gather, under no_grad: pre on the stream that gathers, post on the one that waits.
    The first gather compares pre's results on all ranks: one object all-gather of a few bytes. A rank without rows
    still calls pre, with one row of zeros, so that collectives inside it match; the result is ignored.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[ManagedParam[Any]],
        data: DataMesh,
        precision: MixedPrecisionPolicy,  # given to pre
        dtype: torch.dtype,  # of the unsharded parameters, given to post
        layer: DeviceLayer,
        make_hook: MakeHook,
    ) -> None:
        self._name, self._params, self._data = name, params, data
        self._precision, self._dtype, self._layer, self._make_hook = precision, dtype, layer, make_hook
        mesh = data.mesh
        self._mesh: DeviceMesh = (
            mesh[mesh.mesh_dim_names[-1]] if data.hybrid and mesh.mesh_dim_names else mesh
        )
        self._members: list[_Member] = []
        self._sent: Pairs = []  # alive until the gather has completed
        self._agreed = False

    # -- the wire form ----------------------------------------------------------------------------------------------

    def dtypes(self, shard: torch.dtype, gathered: torch.dtype) -> tuple[torch.dtype, ...]:
        """The shard's: the sent bytes are known in the first gather only."""
        return (shard,)

    def encoder(self, geometry: Geometry, gathered: Any, recycler: Recycler) -> "SubclassGather":
        """Returns itself: it serves one buffer, and that has no gathered memory."""
        gathered.hold_nothing()
        layout = geometry.layout
        self._recycler = recycler
        for param in self._params:
            width = math.prod(param.shape[1:])
            ranges = [layout.local_range(param.key, rank) for rank in range(layout.world_size)]
            self._members.append(_Member(param, tuple([(stop - start) // width for start, stop in ranges])))
        return self

    # -- before the gather ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, shards: tuple[torch.Tensor, ...]) -> Pairs:
        """Call pre for each parameter; its result is sent as it is, or behind rows of padding."""
        if not self._agreed:
            self._sent = self._first()
        else:
            self._sent = []
            for member in self._members:
                self._sent += self._pairs(member, self._call_pre(member))
        return self._sent

    def _first(self) -> Pairs:
        """First gather: ranks exchange shapes and dtypes to plan receive buffers."""
        described: Described = []
        error: Exception | None = None
        try:
            tensors = [self._call_pre(member) for member in self._members]
            described = [[(_rows_first(t), str(t.dtype)) for t in returned] for returned in tensors]
        except Exception as raised:  # the other ranks must not wait for this one
            error = raised
        by_rank = self._exchange(described, error)
        for index, (member, returned) in enumerate(zip(self._members, tensors, strict=True)):
            self._plan(member, returned, [specs[index] for specs in by_rank])
        self._agreed = True
        pairs: Pairs = []
        for member, returned in zip(self._members, tensors, strict=True):
            pairs += self._pairs(member, returned)
        return pairs

    def _exchange(self, described: Described, error: Exception | None) -> list[Described]:
        data = self._data
        if data.shard_size == 1 or data.simulated:
            if error is not None:
                raise error
            return [described] * data.shard_size
        return raise_on_all_ranks(error, f"{self._name}: {PRE}", described, self._mesh.get_group())

    def _call_pre(self, member: _Member) -> tuple[torch.Tensor, ...]:
        param, extension = member.param, member.extension
        local = local_of(param.sharded)
        plain = extension.unwrap(local)
        if plain.shape[0] == 0:
            local = extension.wrap_like(
                plain.new_zeros((1, *param.shape[1:]), device=self._layer.device), local
            )
        elif plain.device != self._layer.device:
            local = extension.wrap_like(plain.to(self._layer.device, non_blocking=True), local)
        pre: Any = getattr(local, PRE)
        if extension.takes_all:
            shape = torch.Size(param.shape)
            strides = torch.empty(shape, device="meta").stride()
            returned, member.metadata = pre(
                self._mesh, shape, strides, param.places[0].module, self._precision
            )
        else:
            returned, member.metadata = pre(self._mesh)
        if isinstance(returned, torch.Tensor) or not all(type(t) is torch.Tensor for t in returned):
            raise TypeError(
                f"{param.name} in {self._name}: {PRE} of {extension.kind.__name__} returned {type(returned).__name__} "
                "as what to gather; expected a tuple of plain tensors, and metadata"
            )
        return tuple(returned)

    def _plan(self, member: _Member, tensors: tuple[torch.Tensor, ...], by_rank: list[Any]) -> None:
        """Make the planes of one parameter, of pre's result here, and its shapes and dtypes on each rank."""
        who = f"{member.param.name} in {self._name}: what {PRE} of {member.extension.kind.__name__} returned"
        for rank, specs in enumerate(by_rank):
            if [(shape[1:], dtype) for shape, dtype in specs] != [(s[1:], d) for s, d in by_rank[0]]:
                raise ValueError(f"{who} differs: {by_rank[0]} on rank 0, {specs} on rank {rank}")
        member.planes = []  # of a first gather that failed
        expected = [max(rows, 1) for rows in member.rows]
        most, total = max(member.rows), sum(member.rows)
        own = member.rows[self._data.shard_rank]
        for index, tensor in enumerate(tensors):
            shape = _rows_first(tensor)
            counts = [specs[index][0][0] for specs in by_rank]
            if self._data.simulated:
                counts = expected if shape[0] == expected[self._data.shard_rank] else counts
            padded = min(counts) >= most and shape[1:] == tuple(member.param.shape[1:])
            if counts == expected or padded:  # as many rows as the parameter has, on this rank too
                rows, used, filled = most, total, own
            elif len(set(counts)) == 1:  # the same on every rank, independent of its slice
                rows, used, filled = counts[0], counts[0] * len(counts), counts[0]
            else:
                raise ValueError(
                    f"{who} has {counts} rows on the ranks; expected as many as the slices have, {expected}, or the "
                    "same number on each"
                )
            member.planes.append(self._plane(tensor, shape, rows, used, filled))

    @torch.inference_mode(False)
    def _plane(self, tensor: torch.Tensor, shape: tuple[int, ...], rows: int, used: int, own: int) -> _Plane:
        row = math.prod(shape[1:]) * tensor.dtype.itemsize
        memory = Scratch(self._recycler, self._data.shard_size * rows * row)
        memory.materialize()
        output = torch.empty(0, dtype=tensor.dtype, device=self._layer.device)
        strides = torch.empty(shape, device="meta").stride()
        output.set_(memory.flat.untyped_storage(), 0, (used, *shape[1:]), strides)
        return _Plane(shape, tensor.dtype, rows, own, memory, output)

    def _pairs(self, member: _Member, tensors: tuple[torch.Tensor, ...]) -> Pairs:
        specs = [(_rows_first(t), t.dtype) for t in tensors]
        expected = [(plane.shape, plane.dtype) for plane in member.planes]
        if specs != expected:
            raise RuntimeError(
                f"{member.param.name} in {self._name}: {PRE} of {member.extension.kind.__name__} returned {specs}; "
                f"in the first gather it was {expected}, and must stay so"
            )
        pairs: Pairs = []
        for plane, tensor in zip(member.planes, tensors, strict=True):
            plane.memory.materialize()
            send = tensor.contiguous().view(plane.shape)[: plane.own]
            if plane.own < plane.rows:
                padded = send.new_empty((plane.rows, *plane.shape[1:]))
                _bytes(padded)[: send.numel() * send.itemsize].copy_(_bytes(send))
                send = padded
            pairs.append((plane.memory.flat, _bytes(send)))
        return pairs

    # -- after the gather -------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # training uses what an evaluation has made first
    @torch.no_grad()
    def decode(self) -> bool:
        """Call post for each parameter."""
        for member in self._members:
            local: Any = local_of(member.param.sharded)
            post = getattr(local, POST)
            outputs = tuple(plane.output for plane in member.planes)
            metadata, member.metadata = member.metadata, None
            if member.unsharded is None:
                self._take(member, *post(outputs, metadata, self._dtype))
                continue
            for storage, nbytes in member.made:
                if storage.nbytes() != nbytes:
                    self._layer.resize(storage, nbytes)
            post(outputs, metadata, self._dtype, out=member.param.unsharded)
        self._sent = []
        return True  # the collective has read the sent tensors

    def _take(self, member: _Member, unsharded: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        """Make the unsharded parameter from post's first result."""
        param = member.param
        if unsharded.shape != torch.Size(param.shape):
            raise ValueError(
                f"{param.name} in {self._name}: {POST} of {member.extension.kind.__name__} made a tensor of shape "
                f"{tuple(unsharded.shape)}; expected {param.shape}"
            )
        planes = {plane.memory.flat.untyped_storage().data_ptr() for plane in member.planes}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in inner}
        member.made = [
            (storage, storage.nbytes()) for pointer, storage in storages.items() if pointer not in planes
        ]
        member.unsharded = unsharded
        param.set_unsharded(unsharded, self._make_hook)

    def release(self) -> None:
        """Free the planes and post's results. The current stream must be behind their last use."""
        for member in self._members:
            for plane in member.planes:
                plane.memory.release()
            for storage, _ in member.made:
                if storage.nbytes():
                    self._layer.resize(storage, 0)

    def retire(self) -> None:
        """Never use the planes' memory again: a gather that failed may still write there, and peers may read it."""
        hold_forever([send for _, send in self._sent])
        for member in self._members:
            for plane in member.planes:
                plane.memory.retire()


def _rows_first(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape; of one number (1,)."""
    return tuple(tensor.shape) or (1,)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)

"""RaggedDTensor: a DTensor of which each rank holds a contiguous run of whole blocks.

It is a DTensor (torch >= 2.12) with its own dispatch, so nothing of torch is replaced: `isinstance(t, DTensor)` is
true, and `placements`, `device_mesh` and the checkpoint protocol work as for any DTensor. `_ops.table` says what
each op does.
"""

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from ragged_shard import _redistribute
from ragged_shard._autograd import FromLocal, Redistribute, ToLocal
from ragged_shard._placement import carried
from ragged_shard._sharding import Sharding, check_stride, contiguous_stride, sharding_of
from ragged_shard._torch_compat import BASE_CLASS, DISTRIBUTED, EqualToDTensor, Op, make_spec, new_wrapper
from ragged_shard.device import CPU
from ragged_shard.dist import same_on_all_ranks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_DATA: Any = torch.Tensor.data
Handler = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]


class Handlers(dict[Op, Handler]):
    """Op -> handler; an op that is not in the table gets the fallback, which refuses ragged operands."""

    fallback: Handler

    def __missing__(self, func: Op) -> Handler:
        return self.fallback


HANDLERS = Handlers()  # filled by `_ops.table`


class RaggedDTensor(BASE_CLASS, metaclass=EqualToDTensor):
    """A distributed tensor with a RaggedShard placement, or with torch's own after redistributing from one.

    Make one with `distribute_tensor`, `distribute_like` or `RaggedDTensor.from_local`; the constructor is not
    public. The local tensor has shape ``(local_prefix, *shape[len(dims):])`` and may be empty. docs/ops.md has the
    table of ops; any other op raises NotImplementedError, and none gathers data behind the user's back.
    """

    __slots__ = ("_apart", "_copy", "_like", "_refusal", "_scratch", "_sharding")
    _apart: bool  # see `save_apart`; else not set
    _copy: "RaggedDTensor | None"  # see `load_into_copy`; else not set
    _like: Sharding  # of the tensor whose new_empty(()) this is; else not set
    _refusal: str  # why `to_local` without grad_placements raises; else "" or not set
    _scratch: bool  # whether new_empty or qr made it, as in `orthogonal_`; else not set
    _local_tensor: torch.Tensor  # the base class's
    _sharding: Sharding

    #: Asked, each of a ragged tensor that is gathered under autograd: why `to_local` of the result must be given
    #: `grad_placements`, or "". For a runtime that knows that ranks compute with different batches.
    refusals: ClassVar[list[Callable[["RaggedDTensor"], str]]] = []

    #: This rank's local tensor, the very object and outside autograd; `to_local` is the differentiable way.
    local: torch.Tensor = property(operator.attrgetter("_local_tensor"))  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("use RaggedDTensor.from_local or ragged_shard.distribute_tensor to make one")

    @classmethod
    def _wrap(cls, local: torch.Tensor, sharding: Sharding, requires_grad: bool = False) -> "RaggedDTensor":
        """Wrap a local tensor that is known to fit. No check, no copy, no communication."""
        spec = sharding._specs.get(local.dtype) or sharding.spec(local.dtype)
        wrapper: RaggedDTensor = new_wrapper(RaggedDTensor, local, spec, requires_grad=requires_grad)
        wrapper._sharding = sharding
        return wrapper

    @staticmethod
    def from_local(
        local: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        check: bool = False,
    ) -> "RaggedDTensor":
        """Wrap this rank's local tensor. The result shares its storage: a write to either one changes both.

        Differentiable. Communicates nothing unless ``check`` is set: then one all-reduce of 64 bytes per mesh axis
        compares shapes, dtypes and placements, and every rank raises if one of them has something wrong. Without
        ``check`` only that rank raises, and the others wait for it in their next collective.

        Args:
            local: shape ``(local_prefix, *shape[len(dims):])``, contiguous; any dtype.
            device_mesh: a mesh that this rank belongs to.
            placements: one for each mesh axis.
            shape: the full tensor's.
            stride: the full tensor's; must be contiguous, which is the default.
            check: compare with the other ranks.

        Raises:
            ValueError: placements that do not fit, or a local tensor of another shape, stride or device type.
            TypeError: ``local`` is itself a distributed tensor.
        """
        sharding, problem = _examine(local, device_mesh, placements, shape, stride)
        agree(problem, "from_local", device_mesh if check else None, placements, shape, local)
        assert sharding is not None
        if local.requires_grad and torch.is_grad_enabled():
            wrapped: RaggedDTensor = FromLocal.apply(local, RaggedDTensor, sharding)
            return wrapped
        return RaggedDTensor._wrap(local.detach() if local.requires_grad else local, sharding)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each mesh axis; on the meta device a RaggedShard of rows that torch's loaders can use."""
        placements: tuple[Placement, ...] = self._spec.placements
        return carried(placements) if self.is_meta else placements

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's local tensor, of shape ``(local_prefix, *shape[len(dims):])``; shares storage. Differentiable.

        Communicates nothing. ``grad_placements`` are the placements of the result's gradient, if not this tensor's
        (``[Partial()]``: each rank's gradient is a summand).

        Raises:
            RuntimeError: one of `refusals` asks for ``grad_placements``.
        """
        local: torch.Tensor = self._local_tensor
        if not torch.is_grad_enabled():
            return local
        if not self.requires_grad:
            return local.view_as(local)
        if grad_placements is None and (refusal := getattr(self, "_refusal", "")):
            raise RuntimeError(refusal)
        sharding = None if grad_placements is None else self._sharding.with_placements(grad_placements)
        result: torch.Tensor = ToLocal.apply(self, sharding)
        return result

    def with_local(self, local: torch.Tensor) -> "RaggedDTensor":
        """A tensor laid out like this one around another local tensor, outside autograd. Communicates nothing.

        Args:
            local: of this tensor's local shape, contiguous; any dtype. Not checked: for callers who make many.
        """
        return RaggedDTensor._wrap(local, self._sharding)

    @overload
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = ...,
        placements: Sequence[Placement] | None = ...,
        *,
        async_op: Literal[False] = ...,
    ) -> "RaggedDTensor": ...

    @overload
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = ...,
        placements: Sequence[Placement] | None = ...,
        *,
        async_op: Literal[True],
    ) -> "RedistributeHandle": ...

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> "RaggedDTensor | RedistributeHandle":
        """The same tensor with other placements on the same mesh. Differentiable.

        The table in docs/guide.md says which collective a change takes and how many bytes each rank sends. If nothing
        changes the result is this very tensor; otherwise it has new storage.

        Args:
            device_mesh: this tensor's mesh, or None.
            placements: the new ones, one for each mesh axis.
            async_op: return a `RedistributeHandle`, whose ``wait()`` returns the tensor. If there are several
                steps, only the last one is asynchronous.

        Raises:
            ValueError: no placements, placements that do not fit, another mesh.
        """
        if placements is None:
            raise ValueError("redistribute needs placements, one for each mesh axis")
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise ValueError(
                f"redistribute moves within a mesh: this tensor is on {self.device_mesh}, asked for {device_mesh}"
            )
        target = self._sharding.with_placements(placements)
        handle = RedistributeHandle(self, target)
        return handle if async_op else handle.wait()

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The full tensor as a plain one, on every rank: redistribute to Replicate, then to_local. Differentiable.

        Communicates as Ragged -> Replicate does (one collective per mesh axis that is not Replicate). The backward
        communicates nothing, since it takes the gradient to be the same on all ranks; if each rank's gradient is a
        summand, pass ``grad_placements=[Partial()]``, and it is reduce-scattered. Raises as `to_local` does.
        """
        gathered = self.redistribute(placements=(Replicate(),) * self.device_mesh.ndim)
        local: torch.Tensor = gathered.to_local(grad_placements=grad_placements)
        return local.clone() if gathered is self else local

    def data_ptr(self) -> int:
        """Address of this rank's local tensor; 0 if that is empty. Communicates nothing."""
        return self._local_tensor.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of this rank's local tensor."""
        return self._local_tensor.untyped_storage()

    def set_(self, source: Any, storage_offset: Any = 0, size: Any = (), stride: Any = ()) -> "RaggedDTensor":
        """Make ``x.new_empty(())`` a tensor like x whose local tensor is in another storage.

        So torch's checkpoint staging copies a tensor: `new_empty` without a size, `set_` with the original's size and
        storage offset. Its conversion to fake tensors gives a tensor its own storage once more, which changes nothing.

        Raises:
            NotImplementedError: anything else.
        """
        if source is self._local_tensor.untyped_storage() and self.shape == torch.Size(size):
            return self
        like: Sharding | None = getattr(self, "_like", None)
        if like is None or torch.Size(size) != like.shape or not isinstance(source, torch.UntypedStorage):
            raise NotImplementedError(
                f"set_ on {self._sharding}: use RaggedDTensor.from_local to wrap other memory, or assign to data"
            )
        assert like.local_shape is not None
        local = torch.empty(0, dtype=self.dtype, device=self.device)
        local.set_(source, storage_offset, like.local_shape, contiguous_stride(like.local_shape))
        self.data = RaggedDTensor._wrap(local, like)
        return self

    def t_(self) -> "RaggedDTensor":
        """Transpose a tensor of ``orthogonal_``'s, which `new_empty` or `qr` made; it is gathered, and Replicate then.

        Raises:
            NotImplementedError: another tensor, which would no longer share memory with its views.
        """
        if not getattr(self, "_scratch", False) or self.requires_grad:
            return super().t_()  # type: ignore[no-any-return]  # which is refused
        full = self.full_tensor().t().contiguous()
        self.data = RaggedDTensor._wrap(full, self._sharding.replicated(full.shape))
        return self

    @property
    def data(self) -> "RaggedDTensor":
        """The same tensor without autograd. Assigning a ragged tensor takes its local tensor and placements."""
        result: RaggedDTensor = _DATA.__get__(self)
        return result

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, RaggedDTensor):
            raise TypeError(
                f"data of a ragged tensor ({self._sharding}) can only be another ragged tensor, got a "
                f"{type(value).__name__}; make one with ragged_shard.distribute_like of a full tensor, or "
                "ragged_shard.redistribute of a DTensor"
            )
        _DATA.__set__(self, value)  # torch's setter exchanges shape and dtype only
        self._local_tensor = value._local_tensor  # type: ignore[misc]  # a slot of the base class
        self._sharding = value._sharding
        self._spec = value._sharding.spec(value._local_tensor.dtype)  # type: ignore[misc]

    def quantile(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's, of a tensor with torch's own placements. Raises for a ragged one, and communicates nothing.

        `torch.quantile(tensor)` raises too; torch >= 2.14 makes it of ops of which the first asks all ranks for NaN.
        """
        if self._sharding.axis is not None:
            HANDLERS.fallback(torch.ops.aten.quantile.default, (self,), {})
        return super().quantile(*args, **kwargs)  # type: ignore[no-any-return]

    def nanquantile(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `quantile`."""
        if self._sharding.axis is not None:
            HANDLERS.fallback(torch.ops.aten.nanquantile.default, (self,), {})
        return super().nanquantile(*args, **kwargs)  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return HANDLERS[func](func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"RaggedDTensor({self._sharding}, local={self._local_tensor})"

    def __format__(self, format_spec: str) -> str:
        """A number that all ranks have formats as in a plain tensor. Communicates nothing.

        Raises:
            TypeError: a format for several numbers, or for one that some ranks do not have.
        """
        if self.ndim == 0 and not self.is_meta and self._sharding.replicate:
            return format(self._local_tensor.item(), format_spec)
        if self.ndim == 0 and format_spec:
            raise TypeError(
                f"not every rank has the number to format ({self._sharding}); format item() or full_tensor(), which "
                "every rank must call"
            )
        return super().__format__(format_spec)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> "RaggedDTensor":
        if id(self) in memo:
            result: RaggedDTensor = memo[id(self)]
            return result
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; detach() this one first")
        copied = RaggedDTensor._wrap(self._local_tensor.detach().clone(), self._sharding, self.requires_grad)
        copied.__dict__.update(self.__dict__)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        sharding = self._sharding
        local = self._local_tensor.detach()
        if getattr(self, "_apart", False):
            local = local.clone()
        layout = (sharding.mesh, sharding.placements, tuple(sharding.shape))
        return (_rebuild, (local, *layout, self.requires_grad, dict(self.__dict__)))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], flat: Any, outer_size: Any, outer_stride: Any
    ) -> "RaggedDTensor":
        # The base class flattens, in the form that torch.compile expects of a DTensor.
        placements, meta, third, requires_grad = flat
        mesh, local = inner.get("device_mesh", third), inner["_local_tensor"]
        sharding = sharding_of(mesh, placements, meta.shape)
        ragged = sharding.axis is not None
        spec = make_spec(mesh, placements, outer_size, outer_stride, local.dtype, ragged=ragged)
        wrapper: RaggedDTensor = new_wrapper(RaggedDTensor, local, spec, requires_grad=requires_grad)
        wrapper._sharding = sharding
        return wrapper

    def __create_write_items__(self, fqn: str, object: object) -> "list[WriteItem]":
        from ragged_shard import _checkpoint  # torch's checkpoints take as long to import as torch's DTensor

        return _checkpoint.write_items(fqn, self)

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from ragged_shard import _checkpoint

        if hasattr(self, "_copy"):
            self._copy = self.with_local(self.local.clone())
        return _checkpoint.chunk_list(self._sharding)

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        from ragged_shard import _checkpoint

        return _checkpoint.tensor_shard(self.loaded, index)

    def save_apart(self) -> None:
        """Let pickles hold a copy of the local tensor: torch.save refuses memory that has tensors of two dtypes."""
        self._apart = True

    def load_into_copy(self) -> None:
        """Make torch's checkpoints load into a copy, `loaded`, instead of this tensor. Its views do not inherit that.

        For a tensor that a state dict has under two names, whose values in a checkpoint may differ.
        """
        self._copy = None

    @property
    def loaded(self) -> "RaggedDTensor":
        """The target of torch's checkpoints: this tensor, or after `load_into_copy` a copy, once that was loaded."""
        copy: RaggedDTensor | None = getattr(self, "_copy", None)
        return self if copy is None else copy


class RedistributeHandle:
    """A started redistribution. ``wait()`` returns the tensor, and the same one when called again."""

    def __init__(self, tensor: RaggedDTensor, target: Sharding) -> None:
        self._tensor: RaggedDTensor | None = tensor
        self._target = target
        self._result: RaggedDTensor | None = tensor if target == tensor._sharding else None
        if self._result is None:
            with torch.no_grad():
                self._pending = _redistribute.start(tensor._local_tensor, tensor._sharding, target)

    def wait(self) -> RaggedDTensor:
        """The redistributed tensor; blocks until it is complete (on a GPU: makes the current stream wait)."""
        if self._result is None:
            assert self._tensor is not None
            if torch.is_grad_enabled() and self._tensor.requires_grad:
                self._result = gathered = Redistribute.apply(self._tensor, self._target, self._pending)
                if self._target.replicate and self._tensor._sharding.axis is not None:
                    reasons = (why(self._tensor) for why in RaggedDTensor.refusals)
                    gathered._refusal = next(filter(None, reasons), "")
            else:
                self._result = RaggedDTensor._wrap(self._pending.wait(), self._target)
            self._tensor = None
        assert self._result is not None
        return self._result


def _rebuild(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    requires_grad: bool,
    state: dict[str, Any],
) -> RaggedDTensor:
    """Undo ``__reduce_ex__``."""
    tensor = RaggedDTensor._wrap(local, sharding_of(mesh, placements, torch.Size(shape)), requires_grad)
    tensor.__dict__.update(state)
    return tensor


def agree(
    problem: Exception | None,
    caller: str,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    shape: Sequence[int],
    tensor: torch.Tensor,
) -> None:
    """Raise a problem with a new tensor: on this rank, or with a mesh on all of its ranks, which are compared then."""
    if isinstance(mesh, DeviceMesh):
        described = {
            "placements": tuple(placements), "shape": tuple(shape), "dtype": getattr(tensor, "dtype", None),
        }  # fmt: skip
        same_on_all_ranks(described, mesh.get_all_groups(), error=problem, caller=caller)
    if problem is not None:
        raise problem


def _examine(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int] | None,
) -> tuple[Sharding | None, Exception | None]:
    """The sharding that from_local's arguments describe, or the error to raise."""
    try:
        if isinstance(local, DISTRIBUTED):
            raise TypeError(f"from_local takes this rank's plain tensor, got a {type(local).__name__}")
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"device_mesh: expected a DeviceMesh, got {type(mesh).__name__}")
        sharding = sharding_of(mesh, tuple(placements), torch.Size(shape))
        if stride is not None:
            check_stride(sharding.shape, stride, "from_local")
        if sharding.local_shape is not None and local.shape != sharding.local_shape:
            raise ValueError(
                f"from_local: this rank's tensor has shape {tuple(local.shape)}, but {sharding} gives the rank at "
                f"{sharding.coordinate} a local tensor of shape {tuple(sharding.local_shape)}"
            )
        if not local.is_contiguous():
            raise ValueError(
                f"from_local: this rank's tensor of shape {tuple(local.shape)} and stride {local.stride()} is not "
                "contiguous; pass local.contiguous()"
            )
        if local.device.type not in (mesh.device_type, "meta", CPU.type):
            raise ValueError(f"from_local: a tensor on {local.device} for {mesh}")
    except (TypeError, ValueError, NotImplementedError) as error:
        return None, error
    return sharding, None

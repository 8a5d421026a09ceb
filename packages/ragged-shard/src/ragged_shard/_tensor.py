"""RaggedDTensor: a DTensor of which each rank holds a contiguous run of whole blocks.

It is a DTensor (torch >= 2.12) with its own dispatch, so nothing of torch is replaced: `isinstance(t, DTensor)`
holds, `placements`, `device_mesh` and the checkpoint protocol are where they are on any DTensor. What an op
does is in `_ops.table`.
"""

import operator
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ragged_shard import _checkpoint, _comm, _redistribute
from ragged_shard._autograd import FromLocal, Redistribute, ToLocal
from ragged_shard._layout import Layout, check_stride, layout_of
from ragged_shard._ops.registry import HANDLERS
from ragged_shard._torch_compat import BASE_CLASS, Spec, make_spec, new_wrapper

_DATA: Any = torch.Tensor.data


class RaggedDTensor(BASE_CLASS):
    """A distributed tensor with a RaggedShard placement (or with torch's own, on the way to and from one).

    Make one with `distribute_tensor`, `distribute_like` or `RaggedDTensor.from_local`; the constructor is not
    public. The local tensor has shape ``(local_prefix, *shape[len(dims):])`` and may be empty. Ops are those of
    the table in the README; any other raises NotImplementedError, and none gathers data behind the user's back.
    """

    # The local tensor's slot is named anew: torch's checkpoint staging copies the slots that a class itself names.
    __slots__ = ("_layout", "_local_tensor")
    _layout: Layout
    _local_tensor: torch.Tensor

    #: This rank's local tensor, the very object and outside autograd; `to_local` is the differentiable way.
    local: torch.Tensor = property(operator.attrgetter("_local_tensor"))  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            "use RaggedDTensor.from_local or ragged_shard.distribute_tensor to make a RaggedDTensor"
        )

    @classmethod
    def _wrap(cls, local: torch.Tensor, layout: Layout, requires_grad: bool = False) -> "RaggedDTensor":
        """Around a local tensor that is known to fit. No check, no copy, no communication."""
        wrapper: RaggedDTensor = new_wrapper(
            RaggedDTensor, local, layout._specs.get(local.dtype) or layout.spec(local.dtype), requires_grad
        )
        wrapper._layout = layout
        return wrapper

    @staticmethod
    def from_local(
        local: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Any],
        *,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        check: bool = False,
    ) -> "RaggedDTensor":
        """Wrap this rank's local tensor; the result shares its storage, writes go through both ways.

        Differentiable. Communicates nothing, unless ``check``: then one all-reduce of 24 bytes per mesh axis
        compares shapes, dtypes and placements, and a rank that was given something wrong makes every rank raise.
        Without it only that rank raises, and the others wait for it in their next collective.

        Args:
            local: shape ``(local_prefix, *shape[len(dims):])``, contiguous; any dtype.
            device_mesh: a mesh that this rank belongs to.
            placements: one for each mesh axis.
            shape: the full tensor's.
            stride: the full tensor's; must be contiguous, which is the default.
            check: compare with the other ranks.

        Raises:
            ValueError: a layout that means nothing, a local tensor of another shape, stride or device type.
            TypeError: ``local`` is itself a distributed tensor.
        """
        layout, problem = _examine(local, device_mesh, placements, shape, stride)
        if check:
            problem = _agree(device_mesh, local, placements, shape, problem)
        if isinstance(problem, Exception):
            raise problem
        assert layout is not None
        if local.requires_grad and torch.is_grad_enabled():
            wrapped: RaggedDTensor = FromLocal.apply(local, RaggedDTensor, layout)
            return wrapped
        return RaggedDTensor._wrap(local.detach() if local.requires_grad else local, layout)

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """This rank's part: shape ``(local_prefix, *shape[len(dims):])``, the same storage. Differentiable.

        Communicates nothing. ``grad_placements`` says how the gradient of the result will lie over the mesh if not
        like this tensor (``[Partial()]``: each rank's gradient is a summand).
        """
        local: torch.Tensor = self._local_tensor
        if not torch.is_grad_enabled():
            return local
        if not self.requires_grad:
            return local.view_as(local)
        layout = None if grad_placements is None else self._layout.with_placements(grad_placements)
        result: torch.Tensor = ToLocal.apply(self, layout)
        return result

    def with_local(self, local: torch.Tensor) -> "RaggedDTensor":
        """A tensor laid out like this one around another local tensor, outside autograd. Communicates nothing.

        Args:
            local: of this tensor's local shape, contiguous; any dtype. Not checked: for callers who make many.
        """
        layout = self._layout
        spec = layout._specs.get(local.dtype) or layout.spec(local.dtype)
        wrapper: RaggedDTensor = new_wrapper(RaggedDTensor, local, spec, False)
        wrapper._layout = layout
        return wrapper

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """The same tensor in another layout on the same mesh. Differentiable.

        What each step sends is tabled, with its bytes, in `ragged_shard._redistribute`. A layout that does not
        change costs nothing and gives this very tensor; otherwise the result has storage of its own.

        Args:
            device_mesh: this tensor's mesh, or None.
            placements: the new ones, one for each mesh axis.
            async_op: return a `RedistributeHandle`; its ``wait()`` gives the tensor. Of several steps
                only the last is left under way.

        Raises:
            ValueError: no placements, placements that do not fit, another mesh.
        """
        if placements is None:
            raise ValueError("redistribute needs placements, one for each mesh axis")
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise ValueError(
                f"redistribute moves within a mesh: this tensor is on {self.device_mesh}, asked for {device_mesh}"
            )
        target = self._layout.with_placements(placements)
        handle = RedistributeHandle(self, target)
        return handle if async_op else handle.wait()

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """The whole tensor, plain, on every rank: redistribute to Replicate, then to_local. Differentiable.

        Costs what Ragged -> Replicate costs (one collective per mesh axis that is not Replicate). Backward of
        the gather communicates nothing, since the gradient is taken to be the same on all ranks; say
        ``grad_placements=[Partial()]`` where each rank's is a summand, and it is reduce-scattered.
        """
        whole = self.redistribute(placements=(Replicate(),) * self.device_mesh.ndim)
        local: torch.Tensor = whole.to_local(grad_placements=grad_placements)
        return local.clone() if whole is self else local

    @property
    def data(self) -> "RaggedDTensor":
        """The same tensor without autograd.

        Assigning another ragged tensor takes over its local tensor and layout.
        """
        found: RaggedDTensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, RaggedDTensor):
            raise TypeError(
                f"data of a ragged tensor ({self._layout}) can only be another ragged tensor, got a "
                f"{type(value).__name__}; distribute it first with ragged_shard.distribute_like"
            )
        _DATA.__set__(self, value)  # torch's own swaps shape and dtype, and knows of nothing else
        self._local_tensor, self._layout = value._local_tensor, value._layout
        self._spec = value._layout.spec(value._local_tensor.dtype)  # type: ignore[misc]  # a slot of the base

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return HANDLERS[func](func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RaggedDTensor({self._layout}, local={self._local_tensor})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "RaggedDTensor":
        if id(self) in memo:
            found: RaggedDTensor = memo[id(self)]
            return found
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; detach() this one first")
        copied = RaggedDTensor._wrap(self._local_tensor.detach().clone(), self._layout, self.requires_grad)
        copied.__dict__.update(self.__dict__)
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        layout = self._layout
        local = self._local_tensor.detach()
        state = (
            local,
            layout.mesh,
            layout.placements,
            tuple(layout.shape),
            self.requires_grad,
            dict(self.__dict__),
        )
        return (_rebuild, state)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], flat: Any, outer_size: Any, outer_stride: Any
    ) -> "RaggedDTensor":
        # Taken apart by the base class, in the form that torch.compile wants of a DTensor.
        placements, meta, third, requires_grad = flat
        mesh, local = inner.get("device_mesh", third), inner["_local_tensor"]
        layout = layout_of(mesh, placements, meta.shape)
        return _wrap_traced(
            local, layout, make_spec(mesh, placements, outer_size, outer_stride, local.dtype), requires_grad
        )

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return _checkpoint.write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return _checkpoint.chunk_list(self._layout)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return _checkpoint.tensor_shard(self, index)


class RedistributeHandle:
    """A redistribution under way. ``wait()`` gives the tensor; waiting again gives the same one."""

    def __init__(self, tensor: RaggedDTensor, target: Layout) -> None:
        self._tensor: RaggedDTensor | None = tensor
        self._target = target
        self._result: RaggedDTensor | None = tensor if target == tensor._layout else None
        if self._result is None:
            with torch.no_grad():
                self._pending = _redistribute.start(tensor._local_tensor, tensor._layout, target)

    def wait(self) -> RaggedDTensor:
        """The redistributed tensor; blocks until its bytes are there (on a GPU: makes the current stream wait)."""
        if self._result is None:
            assert self._tensor is not None
            if torch.is_grad_enabled() and self._tensor.requires_grad:
                self._result = Redistribute.apply(self._tensor, self._target, self._pending)
            else:
                self._result = RaggedDTensor._wrap(self._pending.wait(), self._target)
            self._tensor = None
        assert self._result is not None
        return self._result


def _wrap_traced(local: torch.Tensor, layout: Layout, spec: Spec, requires_grad: bool) -> RaggedDTensor:
    wrapper: RaggedDTensor = new_wrapper(RaggedDTensor, local, spec, requires_grad)
    wrapper._layout = layout
    return wrapper


def _rebuild(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Any, ...],
    shape: tuple[int, ...],
    requires_grad: bool,
    state: dict[str, Any],
) -> RaggedDTensor:
    """Undo ``__reduce_ex__``."""
    tensor = RaggedDTensor._wrap(local, layout_of(mesh, placements, torch.Size(shape)), requires_grad)
    tensor.__dict__.update(state)
    return tensor


def _examine(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int], stride: Any
) -> tuple[Layout | None, Exception | None]:
    """The layout these mean, or what is wrong with them."""
    try:
        if isinstance(local, (DTensor, RaggedDTensor)):
            raise TypeError(f"from_local takes this rank's plain tensor, got a {type(local).__name__}")
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"device_mesh: expected a DeviceMesh, got {type(mesh).__name__}")
        layout = layout_of(mesh, tuple(placements), torch.Size(shape))
        if stride is not None:
            check_stride(layout.shape, stride, "from_local")
        if layout.local_shape is not None and local.shape != layout.local_shape:
            raise ValueError(
                f"from_local: this rank's tensor has shape {tuple(local.shape)}, but {layout} gives the rank at "
                f"{layout.coordinate} a part of shape {tuple(layout.local_shape)}"
            )
        if not local.is_contiguous():
            raise ValueError(
                f"from_local: this rank's tensor of shape {tuple(local.shape)} and stride {local.stride()} is not "
                "contiguous; pass local.contiguous()"
            )
        if local.device.type not in (mesh.device_type, "meta", "cpu"):
            raise ValueError(f"from_local: a tensor on {local.device} for {mesh}")
    except (TypeError, ValueError, NotImplementedError) as error:
        return None, error
    return layout, None


def _agree(
    mesh: DeviceMesh, local: Any, placements: Any, shape: Any, problem: Exception | None
) -> Exception | None:
    text = repr((tuple(placements), tuple(shape), str(getattr(local, "dtype", None))))
    fingerprint = zlib.crc32(text.encode())
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        found = _comm.agree(
            None if problem is None else str(problem), fingerprint, group, torch.device(mesh.device_type)
        )
        if found is not None and problem is None:
            problem = ValueError(f"from_local on {mesh}: {found}")
    return problem

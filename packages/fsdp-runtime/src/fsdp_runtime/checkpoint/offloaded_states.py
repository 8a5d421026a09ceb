"""The states of an optimizer in CPU memory between steps: buckets of them, on the device while they are updated."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from dbuffer import DeviceLayer, device_layer
from ragged_shard import DISTRIBUTED, RaggedDTensor

from .._grads.on_host import host_gradient
from .._torch.tree import local_tensor, tensors_in
from .offload import HostCopy

_ALIGNMENT = 16


@dataclass
class _Bucket:
    """Parameters, and the storages of their states, which move together.

    Attributes:
        packed: the states, as views of the bucket's storage, of torch's optimizers.
        grads: those that were brought from CPU memory, in a step.
    """

    params: list[torch.Tensor] = field(default_factory=list)
    copies: list[HostCopy] = field(default_factory=list)
    packed: list[torch.Tensor] = field(default_factory=list)
    grads: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)


class OffloadedStates:
    """The states of an optimizer on a device, in CPU memory between steps.

    Of block_optim's optimizers it uses `step`, `state`, `trained`, `skip_nonfinite` and state dicts.

    Args:
        optimizer: its states are on the device.
        layer: of the parameters' device.
        bucket_bytes: of states in a bucket, for torch's optimizers; None for block_optim's.

    Attributes:
        state: the optimizer's, as it is in CPU memory.
    """

    def __init__(self, optimizer: Any, layer: DeviceLayer, bucket_bytes: int | None) -> None:
        self._optimizer, self._layer, self._bucket_bytes = optimizer, layer, bucket_bytes
        self._copies = layer.new_stream()
        self._buckets: list[_Bucket] = []
        self._known: list[torch.Tensor] = []  # kept, so that no other tensor gets the id of one
        self._at_host: dict[int, torch.Tensor] = {}
        self._on_host: dict[torch.Tensor, torch.Tensor] = {}  # gradients of the step under way
        self.state: dict[Any, Any] = {}
        self.find()

    def step(self, grad_norm: torch.Tensor | float | None) -> None:
        """Update all parameters that have a gradient; with block_optim's, none if one is not finite on some rank."""
        optimizer = self._optimizer
        if self._bucket_bytes is not None:
            self._fill_buckets()  # parameters may have been added
            self._step_by_bucket({})
        elif len(self._buckets) < 2:
            with self._grads_on_device():
                for _ in self._in_turn() if self._buckets else (None,):
                    optimizer.step(grad_norm=grad_norm)
        elif self._is_finite(grad_norm):
            self._step_by_bucket({"grad_norm": 0.0})  # finite: all ranks were asked
        else:
            with self._grads_on_device():
                optimizer.step(grad_norm=math.inf)  # counts it, and looks at gradients only
            return
        self.find()

    def _find_grads(self) -> dict[torch.Tensor, torch.Tensor]:
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        grads = {param: param.grad for param in params if param.grad is not None}
        self._on_host = {
            param: gradient for param, grad in grads.items() if (gradient := host_gradient(grad)) is not None
        }
        return grads

    @contextmanager
    def _grads_on_device(self) -> Iterator[None]:
        """Inside, `.grad` is on the device for all parameters."""
        grads = self._find_grads()
        if self._on_host:
            grads_only = _Bucket(list(self._on_host))
            self._layer.wait(self._bring(grads_only))
            for param, grad in grads_only.grads.items():
                param.grad = grad
            self._on_host = {}
        try:
            yield
        finally:
            for param, grad in grads.items():
                param.grad = grad

    def _step_by_bucket(self, options: dict[str, Any]) -> None:
        grads = self._find_grads()
        in_buckets = {param for bucket in self._buckets for param in bucket.params}
        rest = _Bucket([param for param in grads if param not in in_buckets])
        try:
            for param in grads:
                param.grad = None
            for bucket in self._in_turn():
                self._step_with(bucket, grads, options)
            self._layer.wait(self._bring(rest))
            self._step_with(rest, grads, options)
        finally:
            for param, grad in grads.items():
                param.grad = grad

    def _step_with(
        self, bucket: _Bucket, grads: Mapping[torch.Tensor, torch.Tensor], options: dict[str, Any]
    ) -> None:
        """Let the optimizer see the gradients of a bucket's parameters alone."""
        brought, bucket.grads = bucket.grads, {}
        params = [param for param in bucket.params if param in grads]
        if not params:
            return
        for param in params:
            param.grad = brought.get(param, grads[param])
        self._optimizer.step(**options)
        for param in params:
            param.grad = None

    def _in_turn(self) -> Iterator[_Bucket]:
        """Each bucket, while its states are on the device; the next one's are on their way."""
        layer, buckets = self._layer, self._buckets
        arrived = [self._bring(bucket) for bucket in buckets[:1]]
        leaving: list[Any] = []
        for number, bucket in enumerate(buckets):
            if number + 1 < len(buckets):
                arrived.append(self._bring(buckets[number + 1]))
            layer.wait(arrived[number])
            yield bucket
            if self._bucket_bytes is not None:
                self._pack(bucket)
            leaving.append(self._send(bucket))
            if number:
                self._free(buckets[number - 1], leaving[number - 1])
        if buckets:
            self._free(buckets[-1], leaving[-1])

    def _bring(self, bucket: _Bucket) -> Any:
        """Start bringing a bucket's states and gradients; returns the event after which they are there."""
        starts: list[Callable[[], object]] = [copy.fetch for copy in bucket.copies]
        for copy in bucket.copies:
            copy.allocate()
        for param in bucket.params:
            if (host := self._on_host.get(param)) is not None:
                here = torch.empty_like(host, device=self._layer.device, pin_memory=False)
                starts.append(partial(here.copy_, host, non_blocking=True))
                bucket.grads[param] = cast(RaggedDTensor, param).with_local(here)
        return self._copy(starts)

    def _send(self, bucket: _Bucket) -> Any:
        """Start copying a bucket's states to the CPU; returns the event after which they are there."""
        return self._copy(copy.send for copy in bucket.copies)

    def _copy(self, starts: Iterable[Callable[[], object]]) -> Any:
        with self._layer.on(self._copies, [self._layer.record()]):
            for start in starts:
                start()
        return self._layer.record(self._copies)

    def _free(self, bucket: _Bucket, sent: Any) -> None:
        """Free the memory, in the stream that it is from, after the copies out of it."""
        self._layer.wait(sent)
        for copy in bucket.copies:
            copy.free()

    def _is_finite(self, grad_norm: torch.Tensor | float | None) -> bool:
        """Whether all gradients are, on all ranks. Communicates 4 bytes for each group that cuts a parameter."""
        if not self._optimizer.skip_nonfinite:
            return True
        if grad_norm is not None:
            norm = grad_norm.full_tensor() if isinstance(grad_norm, DISTRIBUTED) else grad_norm
            return math.isfinite(float(norm))
        bad = torch.zeros((), dtype=torch.float32, device=self._layer.device)
        tensors = [param.tensor for param in self._optimizer.trained]
        grads = [
            local_tensor(tensor.grad) if (host := host_gradient(tensor.grad)) is None else host
            for tensor in tensors
            if tensor.grad is not None
        ]
        finite = [grad.isfinite().all().to(bad.device) for grad in grads if grad.numel()]
        if finite:
            bad.copy_(torch.stack(finite).all().logical_not())
        groups: dict[str, dist.ProcessGroup] = {}
        for tensor in tensors:
            for axis, placement in enumerate(getattr(tensor, "placements", ())):
                if not isinstance(placement, Replicate):
                    group = tensor.device_mesh.get_group(axis)
                    groups.setdefault(group.group_name, group)
        for group in groups.values():
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
        return not bad.item()

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return device_layer(tensor.device) is self._layer

    # -- where states are ----------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Find buckets again if states were made, replaced or dropped; move those on the device to the CPU."""
        tensors = self._all_tensors()
        if len(tensors) != len(self._known) or not all(map(operator.is_, tensors, self._known)):
            if self._bucket_bytes is None:
                self._find_buckets()
            else:
                self._fill_buckets()
                for bucket in self._buckets:
                    if self._pack(bucket):
                        self._free(bucket, self._send(bucket))
            self._known = self._all_tensors()
            copies = {copy.storage._cdata: copy for bucket in self._buckets for copy in bucket.copies}
            self._at_host = {}
            for tensor in self._known:
                local = local_tensor(tensor)
                if (copy := copies.get(local.untyped_storage()._cdata)) is not None:
                    self._at_host[id(tensor)] = _wrapped(tensor, copy.view(local))
        self.state = {param: self._shown(state) for param, state in self._optimizer.state.items()}

    def _open(self) -> None:
        """Bring all states to the device at once."""
        for bucket in self._buckets:
            for copy in bucket.copies:
                copy.allocate()
                copy.fetch()

    def _close(self) -> None:
        """Move all states to the CPU."""
        for bucket in self._buckets:
            for copy in bucket.copies:
                copy.send()
        for bucket in self._buckets:
            for copy in bucket.copies:
                copy.free()

    def wait(self) -> None:
        """Block the CPU until the copies of the last step are done."""
        self._layer.wait_on_host(self._layer.record(self._copies))
        self._layer.wait_on_host(self._layer.record())

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, with states in CPU memory; after `wait`."""
        state_dict = self._optimizer.state_dict()
        return {**state_dict, "state": self._shown(state_dict["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own; all states are on the device meanwhile."""
        if self._bucket_bytes is None:
            self._open()
            self._optimizer.load_state_dict(state_dict)
            self._close()
        else:
            self._optimizer.load_state_dict(state_dict)
        self.find()

    def _shown(self, tree: Any) -> Any:
        """A tree of states, those that move as they are in CPU memory."""
        if isinstance(tree, torch.Tensor):
            return self._at_host.get(id(tree), tree)
        if isinstance(tree, Mapping):
            return {key: self._shown(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._shown(value) for value in tree)
        return tree

    def _tensors(self) -> dict[torch.Tensor, list[torch.Tensor]]:
        """The tensors of each parameter's state, outermost objects."""
        return {param: tensors_in(state) for param, state in self._optimizer.state.items()}

    def _all_tensors(self) -> list[torch.Tensor]:
        return [tensor for tensors in self._tensors().values() for tensor in tensors]

    # -- buckets of torch's optimizers ---------------------------------------------------------------------------------

    def _fill_buckets(self) -> None:
        """Put parameters into buckets again if there are others."""
        assert self._bucket_bytes is not None
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        known = [param for bucket in self._buckets for param in bucket.params]
        if len(params) == len(known) and all(map(operator.is_, params, known)):
            return
        self._open()  # states move to other storages
        self._buckets, filled = [], self._bucket_bytes + 1
        for param in params:
            nbytes = 2 * local_tensor(param).nbytes  # as Adam's
            if filled + nbytes > self._bucket_bytes:
                self._buckets.append(_Bucket())
                filled = 0
            self._buckets[-1].params.append(param)
            filled += nbytes
        for bucket in self._buckets:
            if self._pack(bucket):
                self._free(bucket, self._send(bucket))

    def _pack(self, bucket: _Bucket) -> bool:
        """Move the states of a bucket, which are on the device, into one storage. Returns whether any was not there."""
        states = [self._optimizer.state[param] for param in bucket.params if param in self._optimizer.state]
        moving = [
            (state, key, value, local)
            for state in states
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.numel() > 1
            if self._is_here(local := local_tensor(value))
        ]
        tensors = [value for _, _, value, _ in moving]
        if len(tensors) == len(bucket.packed) and all(map(operator.is_, tensors, bucket.packed)):
            return False
        sizes = [-(-local.nbytes // _ALIGNMENT) * _ALIGNMENT for *_, local in moving]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._layer.device)
        bucket.packed, end = [], 0
        for (state, key, value, local), size in zip(moving, sizes, strict=True):
            place = flat[end : end + local.nbytes].view(local.dtype).view(local.shape)
            place.copy_(local)
            state[key] = _wrapped(value, place)
            bucket.packed.append(state[key])
            end += size
        bucket.copies = [HostCopy(flat.untyped_storage(), self._layer)] if end else []
        return True

    # -- buckets of block_optim's optimizers ---------------------------------------------------------------------------

    def _find_buckets(self) -> None:
        """Bring all states to the device, put those into buckets that share storages, and move them to the CPU."""
        self._open()
        self._optimizer.state_dict()  # ends work next to the steps; copies assigned states into their own memory
        by_storage: dict[int, _Bucket] = {}
        several = _updates_alone(self._optimizer)
        for param, tensors in self._tensors().items():
            storages = {
                local.untyped_storage()._cdata: local.untyped_storage()
                for local in map(local_tensor, tensors)
                if self._is_here(local) and local.numel() > 1
            }
            shared = [by_storage[key] for key in storages if key in by_storage]
            if not shared and by_storage and not several:
                shared = [next(iter(by_storage.values()))]
            bucket = shared[0] if shared else _Bucket()
            for other in shared[1:]:
                if other is not bucket:
                    bucket.copies += other.copies
                    bucket.params += other.params
                    by_storage.update({copy.storage._cdata: bucket for copy in other.copies})
            for key, storage in storages.items():
                if key not in by_storage:
                    bucket.copies.append(HostCopy(storage, self._layer))
                    by_storage[key] = bucket
            if storages:
                bucket.params.append(param)
        self._buckets = list({id(bucket): bucket for bucket in by_storage.values()}.values())
        self._close()


def _updates_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it updates each parameter separately, so that buckets of them can be updated one after the other."""
    from block_optim import AdamW, AdamW8bit

    return type(optimizer) in (AdamW, AdamW8bit)


def _wrapped(like: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, on other local memory."""
    wrapped: Any = local
    if isinstance(like, RaggedDTensor):
        wrapped = like.detach().with_local(local)
    elif isinstance(like, DTensor):  # from_local would move it to the mesh's device
        with torch.no_grad():  # so that to_local is the tensor itself
            wrapped = torch.empty_like(like, device=local.device)
            wrapped.to_local().set_(local)
    return cast(torch.Tensor, wrapped)

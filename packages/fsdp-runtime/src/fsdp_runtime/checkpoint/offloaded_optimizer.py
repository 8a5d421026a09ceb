"""An optimizer whose states are in CPU memory, and which updates on the device: bucket by bucket, copies in flight.

    copies    in 0 | in 1 |  out 0 | in 2 |  out 1 | in 3 |  out 2 ...
    compute          step 0        | step 1        | step 2  ...

"in" fills a bucket's storages on the device, "out" copies them back, after which they are emptied. Step i waits for
"in i", "out i" for step i. The objects of the states stay; their storages are empty between steps.

    torch's optimizers    a bucket has parameters of up to so many bytes; their states are moved into one storage
    block_optim's         a bucket has parameters whose states share storages: AdamW's and AdamW8bit's of a group, of
                          optimizers that look at several parameters at a time all
"""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from dbuffer import DeviceLayer, device_layer
from ragged_shard import RaggedDTensor

from .._grads.on_host import host_gradient
from .._torch.tree import local_tensor, tensors_in
from .offload import HostCopy

# Those that update each parameter by itself, so that buckets of them can be updated one after the other.
_KNOWN = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
_ALIGNMENT = 16
_BUCKET_BYTES = 1 << 28


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer of torch or block_optim with its states in CPU memory; the update runs on the parameters' device.

    It takes gradients that `SelectiveOffloadPolicy(gradients=True)` keeps in CPU memory: they come with the states.

    A step copies the states of a bucket of parameters to the device, updates these, and copies the states back, while
    the next bucket's states are on their way. Between steps no states are on the device, and values are those of the
    optimizer itself. `state` and state dicts show the states in CPU memory (page-locked); call `wait` before other code
    reads them on the CPU. Parameter groups are the optimizer's own, so that learning rate schedulers take either.

    Up to three buckets are on the device in a step. With torch's optimizers each moves by one copy. A bucket of
    block_optim's AdamW and AdamW8bit is what they allocate together, which is a parameter group: give each unit's
    parameters a group; a copy moves one kind of state, and a skipped step moves nothing. Muon, Shampoo, SOAP, Mixed and
    optimizers of your own are one bucket: their states are on the device in a step, all of them. All states are there
    while a state dict is loaded.

    Communicates nothing of its own with torch's optimizers. With AdamW and AdamW8bit of several groups the 4 bytes that
    these communicate for non-finite gradients; and Muon assigns its matrices anew in each step, 16 bytes for each
    process group. Where parameters are in CPU memory it is the optimizer itself.

    Args:
        optimizer: one of torch.optim's that update each parameter by itself, or one of block_optim's. It belongs to
            this one from now on.
        bucket_bytes: of states in a bucket, with torch's optimizers; a parameter with more has a bucket to itself. 256
            MiB by default.

    Raises:
        TypeError: another optimizer.
        ValueError: no positive `bucket_bytes`, or one for an optimizer of block_optim; parameters on several devices.
    """

    takes_host_gradients = True

    def __init__(self, optimizer: torch.optim.Optimizer, *, bucket_bytes: int | None = None) -> None:
        of_blocks = is_of_blocks(optimizer)
        name = type(optimizer).__name__
        if not of_blocks and type(optimizer) not in _KNOWN:
            names = sorted(kind.__name__ for kind in _KNOWN)
            raise TypeError(
                f"OffloadedOptimizer: {name} may look at several parameters at a time; expected one of block_optim's, "
                f"or one of torch.optim's {names}"
            )
        if of_blocks and bucket_bytes is not None:
            raise ValueError(
                f"bucket_bytes does not apply to {name} of block_optim, whose buckets are what it allocates together "
                "(parameter groups); leave it out"
            )
        bucket_bytes = _BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        if type(bucket_bytes) is not int or bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes!r}; expected a number of bytes from 1")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        devices = {param.device for param in params}
        if len(devices) > 1:
            raise ValueError(
                f"OffloadedOptimizer: parameters on {sorted(map(str, devices))}; expected one device"
            )
        self._inner, self._of_blocks = optimizer, of_blocks
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        layer = device_layer(devices.pop())
        self._offloaded: _OffloadedStates | None = None
        if layer.asynchronous:  # else the states are in CPU memory as they are
            self._offloaded = _OffloadedStates(optimizer, layer, None if of_blocks else bucket_bytes)
            self.state = self._offloaded.state  # type: ignore[assignment]

    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_norm: torch.Tensor | float | None = None
    ) -> Any:
        """Update all parameters that have a gradient. Returns what the closure does.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_norm: for block_optim's, as in their `step`.

        Raises:
            TypeError: `grad_norm` with an optimizer of torch.
        """
        if grad_norm is not None and not self._of_blocks:
            raise TypeError(f"step got grad_norm, which {type(self._inner).__name__} of torch does not take")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._offloaded is None:
            options: dict[str, Any] = {} if grad_norm is None else {"grad_norm": grad_norm}
            self._inner.step(**options)
        else:
            self._offloaded.step(grad_norm)
            self.state = self._offloaded.state  # type: ignore[assignment]
        return loss

    def wait(self) -> None:
        """Block the CPU until the copies of the last step are done, so that it may read the states."""
        if self._offloaded is not None:
            self._offloaded.wait()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, with states in CPU memory."""
        self.wait()
        return self._inner.state_dict() if self._offloaded is None else self._offloaded.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own; the states are in CPU memory afterwards."""
        if self._offloaded is None:
            self._inner.load_state_dict(state_dict)
        else:
            self._offloaded.load_state_dict(state_dict)
        self._follow()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's own."""
        if "_inner" in self.__dict__ and self.__dict__.get("param_groups") is self._inner.param_groups:
            self._inner.add_param_group(param_group)
            if self._offloaded is not None:
                self._offloaded.find()
            self._follow()
        else:
            super().add_param_group(param_group)

    def _follow(self) -> None:
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state if self._offloaded is None else self._offloaded.state  # type: ignore[assignment]


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


class _OffloadedStates:
    """The states of an optimizer on a device, in CPU memory between steps.

    Of block_optim's optimizers it uses `step`, `state`, `trained`, `synchronize`, `skip_nonfinite` and
    state dicts.

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
                    optimizer.synchronize()
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
            norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
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


def is_of_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of block_optim's, or a subclass of theirs."""
    if "block_optim" not in sys.modules:
        return False
    from block_optim import BlockOptimizer

    return isinstance(optimizer, BlockOptimizer)


def _updates_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it updates each parameter separately, so that buckets of them can be updated one after the other."""
    from block_optim import AdamW, AdamW8bit

    return type(optimizer) in (AdamW, AdamW8bit)


def _wrapped(like: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, with other memory in which its local part is."""
    found: Any = local
    if isinstance(like, RaggedDTensor):
        found = like.detach().with_local(local)
    elif isinstance(like, DTensor):
        with (
            torch.no_grad()
        ):  # to_local is then the tensor itself; from_local would move it to the mesh's device
            found = torch.empty_like(like, device=local.device)
            found.to_local().set_(local)
    wrapped: torch.Tensor = found
    return wrapped

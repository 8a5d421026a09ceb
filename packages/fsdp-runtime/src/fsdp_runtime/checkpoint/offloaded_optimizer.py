"""An optimizer whose states are in CPU memory, and which updates on the device: bucket by bucket, copies in flight.

    copies    in 0 | in 1 |  out 0 | in 2 |  out 1 | in 3 |  out 2 ...
    compute          step 0        | step 1        | step 2  ...

"in" brings a bucket's states to one of two slots on the device, "out" takes them back. Step i waits for "in i", "out i"
for step i; "in i + 2" comes after "out i" in the copies' own stream, since it uses the same slot.
"""

from collections.abc import Callable
from typing import Any

import torch

from dbuffer import DeviceLayer, device_layer
from ragged_shard import PinnedMemory, RaggedDTensor

from .offloaded_blocks import OffloadedBlocks, is_of_blocks

State = dict[str, Any]
# Those that update each parameter by itself, so that buckets of them can be updated one after the other.
_KNOWN = tuple(
    getattr(torch.optim, name)
    for name in [
        "Adadelta",
        "Adagrad",
        "Adam",
        "Adamax",
        "AdamW",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ]
)
_ALIGNMENT = 16
_BUCKET_BYTES = 1 << 28


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer of torch or block_optim with its states in CPU memory; the update runs on the parameters' device.

    A step copies the states of a bucket of parameters to the device, updates these, and copies the states back, while
    the next bucket's states are on their way. Between steps no states are on the device, and values are those of the
    optimizer itself. `state` and state dicts show the states in CPU memory (page-locked); call `wait` before other code
    reads them on the CPU. Parameter groups are the optimizer's own, so that learning rate schedulers take either.

    With torch's optimizers two buckets of states are on the device in a step, and each moves by one copy. Of
    block_optim's AdamW and AdamW8bit a bucket is what they allocate together, which is a parameter group: give each
    unit's parameters a group. Up to three are on the device, a copy moves one kind of state, and a skipped step moves
    nothing. Muon, Shampoo, SOAP, Mixed and optimizers of your own are one bucket: their states are on the device in a
    step, all of them. All of block_optim's have all of them there while a state dict is loaded.

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
        self._inner, self._bucket_bytes = optimizer, bucket_bytes
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._layer = device_layer(devices.pop())
        self._of_blocks = of_blocks
        self._blocks: OffloadedBlocks | None = None
        if of_blocks and self._layer.asynchronous:
            self._blocks = OffloadedBlocks(optimizer, self._layer)
            self.state = self._blocks.state  # type: ignore[assignment]
        self._copies = self._layer.new_stream()
        self._buckets: list[_Bucket] = []
        self._known: list[int] = []
        self._slots: list[_Slot] = []
        self._new_states = False  # since slots were made

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
        if self._blocks is not None:
            self._blocks.step(grad_norm)
            self.state = self._blocks.state  # type: ignore[assignment]
            return loss
        if not self._layer.asynchronous:  # the states are in CPU memory as they are
            options: dict[str, Any] = {} if grad_norm is None else {"grad_norm": grad_norm}
            self._inner.step(**options)
            return loss
        self._arrange()
        here, layer = self._layer.current_stream(), self._layer
        for slot in self._slots:
            slot.begin()
        arrived = [self._bring(0, here)] if self._buckets else []
        for number, bucket in enumerate(self._buckets):
            if number + 1 < len(self._buckets):
                arrived.append(self._bring(number + 1, here))
            layer.wait(arrived[number])
            self._update(bucket)
            self._new_states = bucket.adopt(self.state) or self._new_states
            with layer.on(self._copies, [layer.record()]):
                bucket.take_back()
        layer.wait(layer.record(self._copies))
        for slot in self._slots:
            slot.end()
        self._adopt()
        return loss

    def _bring(self, number: int, here: Any) -> Any:
        """Start bringing a bucket's states to its slot; the event after which they are there."""
        bucket = self._buckets[number]
        # A slot's first use follows its allocation; later ones follow the copies before, in their own stream.
        after = [self._layer.record(here)] if number < 2 else []
        with self._layer.on(self._copies, after):
            bucket.bring()
        return self._layer.record(self._copies)

    def _update(self, bucket: "_Bucket") -> None:
        """Let the optimizer see the parameters of one bucket, and their states on the device."""
        every = [group["params"] for group in self.param_groups]
        bucket.show(self.state)
        try:
            for group, params in zip(self.param_groups, bucket.params, strict=True):
                group["params"] = params
            self._inner.step()
        finally:
            for group, params in zip(self.param_groups, every, strict=True):
                group["params"] = params
        bucket.hide(self.state)

    def _arrange(self) -> None:
        """Put parameters into buckets, where there are others than at the last step."""
        params = [id(param) for group in self.param_groups for param in group["params"]]
        if params != self._known:
            self._known = params
            self._buckets = self._make_buckets()
        self._adopt()

    def _make_buckets(self) -> list["_Bucket"]:
        buckets: list[_Bucket] = []
        filled = self._bucket_bytes + 1
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                nbytes = 2 * _local(param).nbytes  # as Adam's
                if filled + nbytes > self._bucket_bytes:
                    buckets.append(_Bucket(self._layer, len(self.param_groups)))
                    filled = 0
                buckets[-1].params[index].append(param)
                filled += nbytes
        return buckets

    def _adopt(self) -> None:
        """Move states to CPU memory that are not there: new ones, and loaded ones."""
        for bucket in self._buckets:
            self._new_states = bucket.adopt(self.state) or self._new_states
        if self._new_states:
            self._new_states = False
            sizes = [max((b.nbytes for b in self._buckets[i::2]), default=0) for i in range(2)]
            self._slots = [_Slot(self._layer, size) for size in sizes]
            for number, bucket in enumerate(self._buckets):
                bucket.use(self._slots[number % 2])

    def wait(self) -> None:
        """Block the CPU until the copies of the last step are done, so that it may read the states."""
        if self._blocks is not None:
            self._blocks.wait()
        elif self._layer.asynchronous:
            self._layer.wait_on_host(self._layer.record(self._copies))
            self._layer.wait_on_host(self._layer.record())

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, with states in CPU memory."""
        self.wait()
        return self._inner.state_dict() if self._blocks is None else self._blocks.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own; the states are in CPU memory afterwards."""
        if self._blocks is not None:
            self._blocks.load_state_dict(state_dict)
            self.state = self._blocks.state  # type: ignore[assignment]
            return
        self._inner.load_state_dict(state_dict)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        if self._layer.asynchronous:
            self._arrange()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's own."""
        if "_inner" in self.__dict__ and self.__dict__.get("param_groups") is self._inner.param_groups:
            self._inner.add_param_group(param_group)
            if self._blocks is not None:
                self._blocks.find()
                self.state = self._blocks.state  # type: ignore[assignment]
        else:
            super().add_param_group(param_group)


class _Slot:
    """Memory on the device for the states of one bucket at a time; between steps there is none."""

    def __init__(self, layer: DeviceLayer, nbytes: int) -> None:
        self._layer, self._nbytes = layer, nbytes
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=layer.device)
        self._storage = self.bytes.untyped_storage()
        self.end()

    def begin(self) -> None:
        self._layer.resize(self._storage, self._nbytes)

    def end(self) -> None:
        self._layer.resize(self._storage, 0)


class _Bucket:
    """Some parameters, and their states in one run of page-locked memory.

    Attributes:
        params: of each of the optimizer's groups.
        nbytes: of the states that move.
    """

    def __init__(self, layer: DeviceLayer, num_groups: int) -> None:
        self.params: list[list[Any]] = [[] for _ in range(num_groups)]
        self.nbytes = 0
        self._layer = layer
        self._host: torch.Tensor | None = None
        self._at_host: dict[Any, State] = {}
        self._on_device: dict[Any, State] = {}
        self._slot: torch.Tensor | None = None
        self._places: list[
            tuple[Any, str, torch.Tensor, int]
        ] = []  # parameter, key, state at the host, first byte
        self._views: dict[tuple[int, str], torch.Tensor] = {}  # the states on the device

    def adopt(self, state: Any) -> bool:
        """Move states that are not in this bucket's memory there. Returns whether there were any."""
        members = [param for params in self.params for param in params if state.get(param)]
        if all(self._at_host.get(param) is state[param] for param in members):
            return False
        places: list[tuple[Any, str, torch.Tensor, int]] = []
        end = 0
        for param in members:
            for key, value in state[param].items():
                if isinstance(value, torch.Tensor) and (
                    value.device == self._layer.device and value.numel() > 1
                ):
                    places.append((param, key, value, end))
                    end += -(-_local(value).nbytes // _ALIGNMENT) * _ALIGNMENT
        host = PinnedMemory(self._layer, end, torch.uint8).empty()
        self._at_host = {param: dict(state[param]) for param in members}
        for param, key, value, at in places:
            kept = _view(host, at, value)
            _local(kept).copy_(_local(value), non_blocking=True)
            self._at_host[param][key] = kept
        self._places = [(param, key, self._at_host[param][key], at) for param, key, _, at in places]
        self._host, self.nbytes = host, end
        self._slot, self._on_device = None, {}
        for param in members:
            state[param] = self._at_host[param]
        return True

    def use(self, slot: _Slot) -> None:
        """Have a slot from now on; the states' views of it are always the same."""
        self._on_device = {param: dict(known) for param, known in self._at_host.items()}
        slot.begin()
        self._slot = slot.bytes[: self.nbytes]
        for param, key, kept, at in self._places:
            self._on_device[param][key] = _view(self._slot, at, kept)
        slot.end()
        self._views = {(id(param), key): self._on_device[param][key] for param, key, _, _ in self._places}

    def bring(self) -> None:
        """Copy the states to the device."""
        if self._slot is not None and self._host is not None:
            self._slot.copy_(self._host, non_blocking=True)

    def take_back(self) -> None:
        """Copy the states to the CPU."""
        if self._slot is not None and self._host is not None:
            self._host.copy_(self._slot, non_blocking=True)

    def show(self, state: Any) -> None:
        """Let the optimizer find the states on the device."""
        for param, known in self._on_device.items():
            state[param] = known

    def hide(self, state: Any) -> None:
        """Let others find those in CPU memory; what was replaced by the update is copied, numbers are taken over."""
        for param, known in self._on_device.items():
            for key, value in known.items():
                expected = self._views.get((id(param), key))
                if expected is None:
                    self._at_host[param][key] = value
                elif value is not expected:
                    _local(expected).copy_(_local(value))
                    known[key] = expected
            state[param] = self._at_host[param]


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.local if isinstance(tensor, RaggedDTensor) else tensor.detach()
    return found


def _view(memory: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, in a run of bytes."""
    local = _local(like)
    view = memory[at : at + local.nbytes].view(local.dtype).view(local.shape)
    return like.detach().with_local(view) if isinstance(like, RaggedDTensor) else view

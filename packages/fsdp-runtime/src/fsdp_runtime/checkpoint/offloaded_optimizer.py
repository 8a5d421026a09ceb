"""An optimizer whose states are in CPU memory, and which updates on the device: bucket by bucket, copies in flight.

    copies    in 0 | in 1 |  out 0 | in 2 |  out 1 | in 3 |  out 2 ...
    compute          step 0        | step 1        | step 2  ...

"in" fills a bucket's storages on the device, "out" copies them back, after which they are emptied. Step i waits for
"in i", "out i" for step i. The objects of the states stay; their storages are empty between steps.

    torch's optimizers    a bucket has parameters of up to so many bytes; their states are moved into one storage
    block_optim's         a bucket has parameters whose states share storages: AdamW's and AdamW8bit's of a group, of
                          optimizers that look at several parameters at a time all
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from dbuffer import device_layer

from .offloaded_states import OffloadedStates

# Those that update each parameter by itself, so that buckets of them can be updated one after the other.
_KNOWN = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
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
        self._offloaded: OffloadedStates | None = None
        if layer.asynchronous:  # else the states are in CPU memory as they are
            self._offloaded = OffloadedStates(optimizer, layer, None if of_blocks else bucket_bytes)
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


def is_of_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of block_optim's, or a subclass of theirs."""
    if "block_optim" not in sys.modules:
        return False
    from block_optim import BlockOptimizer

    return isinstance(optimizer, BlockOptimizer)

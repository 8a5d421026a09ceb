"""States of block_optim's optimizers in CPU memory: they come to the device block by block, and leave after the update.

    copies    in 0 | in 1 |  out 0 | in 2 |  out 1 | in 3 |  out 2 ...
    compute          step 0        | step 1        | step 2  ...

A block is what the optimizer allocates together: parameters whose states share storages, of AdamW and AdamW8bit those
of a group. Optimizers that exchange matrices, or look at several parameters at a time, have one block. The objects of
the states stay; their storages are empty between steps.
"""

import math
import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from dbuffer import DeviceLayer
from ragged_shard import PinnedMemory, RaggedDTensor

from .._torch.tree import local_tensor, tensors_in


def is_of_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of block_optim's, or a subclass of theirs."""
    if "block_optim" not in sys.modules:
        return False
    from block_optim import BlockOptimizer

    return isinstance(optimizer, BlockOptimizer)


def updates_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it updates each parameter by itself, so that blocks of them can be updated one after the other."""
    from block_optim import AdamW, AdamW8bit

    return type(optimizer) in (AdamW, AdamW8bit)


@dataclass
class _Moved:
    """A storage on the device, empty between steps, and its bytes in page-locked memory."""

    layer: DeviceLayer
    storage: torch.UntypedStorage
    nbytes: int
    host: torch.Tensor

    def open(self) -> None:
        self.layer.resize(self.storage, self.nbytes)

    def bring(self) -> None:
        self._bytes().copy_(self.host, non_blocking=True)

    def take_back(self) -> None:
        self.host.copy_(self._bytes(), non_blocking=True)

    def close(self) -> None:
        self.layer.resize(self.storage, 0)

    def _bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """What a tensor over the storage shows, in CPU memory."""
        flat = torch.empty(0, dtype=local.dtype)
        return flat.set_(self.host.untyped_storage(), local.storage_offset(), local.shape, local.stride())


@dataclass
class _Block:
    """Storages that move together, and the parameters whose states are in them."""

    moved: list[_Moved] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)


class OffloadedBlocks:
    """What `OffloadedOptimizer` does with an optimizer of block_optim on a device.

    Uses of it `step`, `state`, `trained`, `synchronize`, `skip_nonfinite` and state dicts.

    Args:
        optimizer: whose states are on the device.
        layer: of the parameters' device.

    Attributes:
        state: the optimizer's, as it is in CPU memory.
    """

    def __init__(self, optimizer: Any, layer: DeviceLayer) -> None:
        self._optimizer, self._layer = optimizer, layer
        self._copies = layer.new_stream()
        self._blocks: list[_Block] = []
        self._known: list[torch.Tensor] = []  # held, so that no other tensor gets the id of one
        self._at_host: dict[int, torch.Tensor] = {}
        self.state: dict[Any, Any] = {}
        optimizer.synchronize()
        self.find()

    def step(self, grad_norm: torch.Tensor | float | None) -> None:
        """Update all parameters that have a gradient; where one is not finite on some rank, none."""
        optimizer = self._optimizer
        if len(self._blocks) < 2:
            self._step_at_once(grad_norm)
            return
        if not self._is_finite(grad_norm):
            optimizer.step(grad_norm=math.inf)  # which counts it, and looks at gradients only
            return
        every = [param for group in optimizer.param_groups for param in group["params"]]
        grads = {param: param.grad for param in every if param.grad is not None}
        in_blocks = {param for block in self._blocks for param in block.params}
        try:
            for param in grads:
                param.grad = None
            for block in self._in_turn():
                self._step_with(grads, block.params)
            self._step_with(grads, [param for param in grads if param not in in_blocks])
        finally:
            for param, grad in grads.items():
                param.grad = grad
        self.find()

    def _step_at_once(self, grad_norm: torch.Tensor | float | None) -> None:
        for _ in self._in_turn() if self._blocks else (None,):
            self._optimizer.step(grad_norm=grad_norm)
            self._optimizer.synchronize()
        self.find()

    def _step_with(self, grads: Mapping[torch.Tensor, torch.Tensor], params: list[torch.Tensor]) -> None:
        mine = [param for param in params if param in grads]
        if not mine:
            return
        for param in mine:
            param.grad = grads[param]
        self._optimizer.step(grad_norm=0.0)  # finite: `step` has asked all ranks
        for param in mine:
            param.grad = None

    def _in_turn(self) -> Iterator[_Block]:
        """Each block, while its states are on the device; the next one's are on their way."""
        layer, blocks = self._layer, self._blocks
        arrived = [self._bring(blocks[0])]
        leaving: list[Any] = []
        for number, block in enumerate(blocks):
            if number + 1 < len(blocks):
                arrived.append(self._bring(blocks[number + 1]))
            layer.wait(arrived[number])
            yield block
            with layer.on(self._copies, [layer.record()]):
                for moved in block.moved:
                    moved.take_back()
            leaving.append(layer.record(self._copies))
            if number:
                self._close(blocks[number - 1], leaving[number - 1])
        self._close(blocks[-1], leaving[-1])

    def _bring(self, block: _Block) -> Any:
        """Start bringing a block's states; the event after which they are there."""
        for moved in block.moved:
            moved.open()
        with self._layer.on(self._copies, [self._layer.record()]):
            for moved in block.moved:
                moved.bring()
        return self._layer.record(self._copies)

    def _close(self, block: _Block, left: Any) -> None:
        """Give the memory back, in the stream that it is from, after the copies out of it."""
        self._layer.wait(left)
        for moved in block.moved:
            moved.close()

    def _is_finite(self, grad_norm: torch.Tensor | float | None) -> bool:
        """Whether all gradients are, on all ranks. Communicates 4 bytes for each group that cuts a parameter."""
        if not self._optimizer.skip_nonfinite:
            return True
        if grad_norm is not None:
            norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
            return math.isfinite(float(norm))
        tensors = [param.tensor for param in self._optimizer.trained]
        grads = [local_tensor(tensor.grad) for tensor in tensors if tensor.grad is not None]
        finite = [grad.isfinite().all() for grad in grads if grad.numel()]
        bad = torch.zeros((), dtype=torch.float32, device=self._layer.device)
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

    # -- where states are ----------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Find blocks again where states were made or dropped; move to the CPU those that are not there."""
        tensors = self._all_tensors()
        if len(tensors) == len(self._known) and all(map(operator.is_, tensors, self._known)):
            return
        self._open()
        self._optimizer.state_dict()  # copies states that were assigned into their own memory, which is there now
        tensors = self._all_tensors()
        self._blocks = self._find_blocks()
        self._known = tensors
        hosts = {moved.storage._cdata: moved for block in self._blocks for moved in block.moved}
        self._at_host = {}
        for tensor in tensors:
            local = local_tensor(tensor)
            if (moved := hosts.get(local.untyped_storage()._cdata)) is not None:
                self._at_host[id(tensor)] = _wrapped(tensor, moved.view(local))
        self._leave()
        self.state = {param: self._shown(state) for param, state in self._optimizer.state.items()}

    def _open(self) -> None:
        """Bring all states to the device at once."""
        for block in self._blocks:
            for moved in block.moved:
                moved.open()
                moved.bring()

    def _leave(self) -> None:
        """Take all states back."""
        for block in self._blocks:
            for moved in block.moved:
                moved.take_back()
        for block in self._blocks:
            for moved in block.moved:
                moved.close()

    def wait(self) -> None:
        """Block the CPU until the copies of the last step are done."""
        self._layer.wait_on_host(self._layer.record(self._copies))
        self._layer.wait_on_host(self._layer.record())

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, with states in CPU memory; after `wait`."""
        found = self._optimizer.state_dict()
        return {**found, "state": self._shown(found["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own; all states are on the device meanwhile."""
        self._open()
        self._optimizer.load_state_dict(state_dict)
        self._leave()
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

    def _find_blocks(self) -> list[_Block]:
        """One, or where each parameter is updated by itself one for all that share storages."""
        found: dict[int, _Block] = {}  # by storage
        several = updates_alone(self._optimizer)
        for param, tensors in self._tensors().items():
            locals_ = [local_tensor(tensor) for tensor in tensors]
            storages = {
                local.untyped_storage()._cdata: local.untyped_storage()
                for local in locals_
                if local.device == self._layer.device and local.numel() > 1
            }
            mine = [found[key] for key in storages if key in found]
            block = mine[0] if mine else next(iter(found.values())) if found and not several else _Block()
            for other in mine[1:]:
                if other is not block:
                    block.moved += other.moved
                    block.params += other.params
                    found.update({moved.storage._cdata: block for moved in other.moved})
            for key, storage in storages.items():
                if key not in found:
                    host = PinnedMemory(self._layer, storage.nbytes(), torch.uint8).empty()
                    block.moved.append(_Moved(self._layer, storage, storage.nbytes(), host))
                    found[key] = block
            if storages:
                block.params.append(param)
        return list({id(block): block for block in found.values()}.values())


def _wrapped(like: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, with other memory in which its local part is."""
    found: Any = local
    if isinstance(like, RaggedDTensor):
        found = like.detach().with_local(local)
    elif isinstance(like, DTensor):
        with (
            torch.no_grad()
        ):  # in which to_local is the tensor itself; from_local would move it to the mesh's device
            found = torch.empty_like(like, device=local.device)
            found.to_local().set_(local)
    wrapped: torch.Tensor = found
    return wrapped

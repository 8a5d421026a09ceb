"""The loss of a step as the mean over the tokens of all ranks and all microbatches, whichever rank has how many.

    rank 0   [a a a a a a] [b b]        8 tokens      loss of a microbatch   sum of its token losses / 12
    rank 1   [c]           [d d d]      4 tokens      gradients              summed over the ranks of each unit
                                       12 tokens

A mean on each rank, averaged over ranks by FSDP, weighs every token of rank 1 twice as much as one of rank 0.

    token_loss = TokenLoss(model)                        # after the last fully_shard
    for microbatches in steps:                           # as many on every rank
        step = token_loss.step(count_tokens(labels) for _, labels in microbatches)
        for tokens, labels in microbatches:
            losses = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            step.loss(losses).backward()                 # of all ranks and microbatches the sum is the mean loss
        optimizer.step()
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ragged_shard.device import CPU

from ._module import FSDPModule
from .checkpoint.targets import units_of


def count_tokens(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Number of labels that count, a 0-d int64 tensor on their device. Does not communicate.

    Pass the labels that the loss gets. Models of transformers shift labels: for those pass `labels[:, 1:]`.
    """
    return (labels != ignore_index).sum()


class TokenLoss:
    """Counts the tokens of each step over the data-parallel ranks, and has all units sum their gradients.

    Sets the gradient divide factor of every unit to 1.0, experts included. Make it after the last `fully_shard`; sum,
    not average, the gradients of parameters in no unit. Communicates nothing before `step`.

    Args:
        module: the model, or a stage of a pipeline (made with `scale_grads=False`); the last stage's ranks count.
        mesh: the ranks that have different tokens: replicas, shards and context parallelism, not tensor parallelism.
            Defaults to the mesh of the units, if all are on the same ranks.

    Raises:
        ValueError: units are on different ranks and there is no `mesh`, or there are several ranks and no unit.
    """

    def __init__(self, module: nn.Module, *, mesh: DeviceMesh | None = None) -> None:
        self._module, units = module, units_of(module)
        meshes = {data.mesh: unit.name for unit in units for data in unit.meshes}
        ranks = {tuple(sorted(each.mesh.flatten().tolist())) for each in meshes}
        if mesh is None and len(ranks) != 1 and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"TokenLoss: units are sharded over {len(ranks)} sets of ranks ({', '.join(meshes.values())}); call "
                "fully_shard first, or pass as mesh= the mesh of all ranks that have different tokens (those of tensor "
                "parallelism have the same)"
            )
        over = mesh if mesh is not None else next(iter(meshes), None)
        self._groups = [] if over is None else [group for group in over.get_all_groups() if group.size() > 1]
        device = CPU if over is None else torch.device(over.device_type)
        self._device = next((unit.data.device for unit in units), device)
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                inner.set_gradient_divide_factor(1.0)  # sums: the losses have been divided

    def step(self, counts: Iterable[int | Tensor]) -> "TokenStep":
        """Count the tokens of a step; call it on every rank, before the step's first loss. The host waits for nothing.

        `counts` are this rank's tokens in each microbatch, as `count_tokens` gives them; may be 0. Communicates one
        all-reduce of 8 bytes for each axis of the mesh with several ranks. Raises RuntimeError if a unit's gradient
        divide factor is not 1.0 any more.
        """
        for unit in units_of(self._module):
            if (factor := unit.options.reduction.divide_factor) != 1.0:
                raise RuntimeError(
                    f"{unit.name}: the gradient divide factor is {factor}, TokenLoss needs 1.0; make TokenLoss "
                    "after the last fully_shard, and do not call set_gradient_divide_factor"
                )
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for count in counts:
            total += torch.as_tensor(count).to(self._device, non_blocking=True)
        for group in self._groups:
            dist.all_reduce(total, group=group)
        return TokenStep(total)


@dataclass(frozen=True)
class TokenStep:
    """One step's number of tokens over all ranks, from `TokenLoss.step`: a 0-d int64 tensor on the units' device.

    Without any token losses are NaN, as torch's means are.
    """

    tokens: Tensor

    @property
    def total(self) -> int:
        """Tokens of all ranks and microbatches; the host waits for the count."""
        return int(self.tokens)

    def loss(self, losses: Tensor) -> Tensor:
        """The scalar for `backward` of one microbatch: its summed token losses, divided by the tokens of all ranks.

        `losses` are of this rank's tokens, of any shape, or their sum; not their mean. Tokens that do not count are 0,
        as `cross_entropy(..., reduction="none" or "sum")` has them.
        """
        total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)) if losses.ndim else losses
        return total / self.tokens

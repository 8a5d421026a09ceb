"""The loss of a step as the mean over the tokens of all ranks and all microbatches, whichever rank has how many.

    rank 0   [a a a a a a] [b b]        8 tokens      loss of a microbatch   sum of its token losses / 12
    rank 1   [c]           [d d d]      4 tokens      gradients              summed over the ranks of each unit
                                       12 tokens

A mean on each rank, averaged over ranks by FSDP, weighs every token of rank 1 twice as much as one of rank 0.

    token_loss = TokenLoss(model)                        # after the last fully_shard
    for microbatches in steps:                           # as many on every rank
        step = token_loss.step(count_tokens(labels) for _, labels in microbatches)
        losses = []
        for tokens, labels in microbatches:
            losses.append(step.loss(F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")))
            losses[-1].backward()
        optimizer.step()
        print(step.mean(losses))
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ragged_shard import CPU, DISTRIBUTED, device_layer, list_ranks

from ._module import FSDPModule
from ._params.unit import Param, Unit
from ._plan.mesh import DataMesh
from ._schedule.model import member_of

_FACTOR = 1.0  # gradients are summed: the losses have been divided
_LEAST = -(1 << 62)


def count_tokens(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Number of labels that count, a 0-d int64 tensor on their device. Does not communicate.

    Pass the labels that the loss gets. Models of transformers shift labels: for those pass `labels[:, 1:]`.
    """
    return (labels != ignore_index).sum()


class TokenLoss:
    """Counts the tokens of each step over the data-parallel ranks, and has all units sum their gradients.

    Sets the gradient divide factor of every unit to 1.0, experts included: an expert's gradient is then the sum over
    the tokens of all ranks, like any other. Make it after the last `fully_shard`. Communicates nothing before `step`.

    Args:
        module: the model, or the stages of a pipeline that this rank has. Without units, in one process, tokens of
            this process count.
        mesh: the ranks that have different tokens: replicas, shards and context parallelism, not tensor parallelism.
            Defaults to the largest mesh that parameters are sharded over. Needed if all parameters are experts', or if
            experts are sharded over the ranks of tensor parallelism too.
        pp_mesh: a 1-D mesh of pipeline stages, with `schedule`.
        schedule: the pipeline's schedule, made with `scale_grads=False`.
        ignored_params: trainable parameters in no unit, whose gradients you sum (not average) over ranks.

    Raises:
        ValueError: a trainable parameter is in no unit, the units' meshes do not say which ranks have different tokens,
            or the schedule divides gradients.
    """

    def __init__(
        self,
        module: nn.Module | Iterable[nn.Module],
        *,
        mesh: DeviceMesh | None = None,
        pp_mesh: DeviceMesh | None = None,
        schedule: Any = None,
        ignored_params: Iterable[nn.Parameter] = (),
    ) -> None:
        self._modules = [module] if isinstance(module, nn.Module) else list(module)
        _check_schedule(pp_mesh, schedule)
        units = list(_units(self._modules))
        _check_ignored(self._modules, units, set(ignored_params))
        self._groups, self._device = _token_groups(units, mesh)
        self._pp = None if pp_mesh is None else pp_mesh.get_group()
        for each in self._modules:
            for inner in each.modules():
                if isinstance(inner, FSDPModule):
                    inner.set_gradient_divide_factor(_FACTOR)

    def step(self, counts: Iterable[int | Tensor] = (), *, wait: bool = True) -> "TokenStep":
        """Count the tokens of a step; call it on every rank, before the step's first loss.

        Communicates one all-reduce of 32 bytes for each axis of the mesh with several ranks, and one for `pp_mesh`.

        Args:
            counts: this rank's tokens in each microbatch, as `count_tokens` gives them; may be 0. Nothing from a
                pipeline's rank that has no labels.
            wait: wait for the total, and raise now. False: the first use does both, when an accelerator has work queued
                to do meanwhile. With `pp_mesh` it always waits, since only the last stage uses the total.

        Raises, on every rank:
            ValueError: no rank has a token, ranks have different numbers of microbatches, or a count is negative.
            RuntimeError: a unit's gradient divide factor is not 1.0 any more.
        """
        self._check_factors()
        sums = self._own(list(counts))
        ranks = 1
        for group in self._groups:
            dist.all_reduce(sums, group=group)
            ranks *= group.size()
        total, number, squares, negative = sums.unbind()
        # Equal on all ranks exactly if the mean of the squares is the square of the mean.
        faults = [(ranks * squares != number * number).long(), negative]
        opposite = torch.where(number > 0, -total, torch.full_like(total, _LEAST))
        figures = torch.stack([total, opposite, *faults])
        if self._pp is not None:
            dist.all_reduce(figures, dist.ReduceOp.MAX, group=self._pp)
        layer = device_layer(self._device)
        step = TokenStep(
            figures.to(CPU, non_blocking=True), layer.record(), self._groups, self._pp, self._device
        )
        if wait or self._pp is not None:
            _ = step.total
        return step

    def _own(self, counts: list[int | Tensor]) -> Tensor:
        """Tokens, microbatches, their square, and how many counts are negative. The host waits for nothing."""
        where = next((count.device for count in counts if isinstance(count, Tensor)), CPU)
        each = torch.empty(0, dtype=torch.int64)
        if counts:
            each = torch.stack([torch.as_tensor(count, device=where) for count in counts])
        if each.dtype.is_floating_point or each.ndim != 1:
            raise TypeError(
                f"token counts of {len(counts)} microbatches have dtype {each.dtype} and shape {tuple(each.shape)}; "
                "expected a whole number for each, such as count_tokens(labels)"
            )
        total, negative = each.sum(), (each < 0).sum()
        number = torch.full_like(total, len(counts))
        return torch.stack([total, number, number * number, negative]).to(self._device, non_blocking=True)

    def _check_factors(self) -> None:
        for unit in _units(self._modules):
            factor = unit.options.reduction.divide_factor
            if factor != _FACTOR:
                raise RuntimeError(
                    f"{unit.name}: the gradient divide factor is {factor}, TokenLoss needs {_FACTOR}; make TokenLoss "
                    "after the last fully_shard, and do not call set_gradient_divide_factor"
                )


@dataclass
class TokenStep:
    """One step's number of tokens over all ranks; from `TokenLoss.step`."""

    _counts: Tensor  # on its way to the host: the total, its opposite, and two faults
    _arrived: Any
    _groups: list[dist.ProcessGroup]
    _pp: dist.ProcessGroup | None
    _device: torch.device
    _total: int = field(default=0, init=False)

    @property
    def total(self) -> int:
        """Tokens of all ranks and microbatches. Raises as `TokenLoss.step`."""
        if not self._total:
            device_layer(self._device).wait_on_host(self._arrived)
            self._total = _checked(*self._counts.tolist())
        return self._total

    def loss(self, losses: Tensor) -> Tensor:
        """What a microbatch calls `backward` on: the sum of its token losses by the tokens of all ranks.

        Args:
            losses: of this rank's tokens in one microbatch, of any shape, or their sum; not their mean. Tokens that do
                not count are 0, as `cross_entropy(..., reduction="none" or "sum")` has them.
        """
        total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)) if losses.ndim else losses
        return total / self.total

    def share(self, count: int) -> float:
        """The weight of a mean over `count` of the tokens, such as a balancing loss: `count / total`."""
        return count / self.total

    @torch.no_grad()
    def mean(self, losses: Tensor | Iterable[Tensor]) -> Tensor:
        """The mean loss over the tokens of all ranks, a 0-d fp64 tensor, the same on every rank. Call it on every rank.

        Communicates one all-reduce of 8 bytes for each axis of the mesh with several ranks, and one for `pp_mesh`.

        Args:
            losses: what `loss` returned in this step; in a pipeline nothing on ranks without the last stage.
        """
        mean = torch.zeros((), dtype=torch.float64, device=self._device)
        for value in [losses] if isinstance(losses, Tensor) else losses:
            mean += (value.full_tensor() if isinstance(value, DISTRIBUTED) else value).to(self._device)
        for group in (*self._groups, *([] if self._pp is None else [self._pp])):
            dist.all_reduce(mean, group=group)
        return mean


def _checked(total: int, opposite: int, uneven: int, negative: int) -> int:
    """The total, if nothing is wrong with it. Every rank has the same numbers."""
    if negative:
        raise ValueError(f"{negative} token counts of this step are negative; expected 0 or more")
    if uneven:
        raise ValueError(
            "ranks have different numbers of microbatches in this step, so that some would wait forever; give each "
            "rank as many, without tokens if need be (labels of ignore_index only)"
        )
    if total and opposite not in (-total, _LEAST):
        raise ValueError(
            f"pipeline stages of the same ranks count {-opposite} and {total} tokens; expected the same labels on "
            "each, or none except on the last stage"
        )
    if not total:
        raise ValueError(
            "no rank has a token in this step, so its mean loss is not defined; skip the step on every rank"
        )
    return total


def _check_schedule(pp_mesh: DeviceMesh | None, schedule: Any) -> None:
    if (pp_mesh is None) != (schedule is None):
        raise ValueError("pass both pp_mesh and schedule for a pipeline, or neither")
    if pp_mesh is not None and pp_mesh.ndim != 1:
        raise ValueError(
            f"pp_mesh has {pp_mesh.ndim} axes {pp_mesh.mesh_dim_names}; pass one, such as mesh['pp']"
        )
    if getattr(schedule, "scale_grads", False):
        raise ValueError(
            f"{type(schedule).__name__} divides gradients by the number of microbatches; make it with scale_grads=False"
        )


def _units(modules: Iterable[nn.Module]) -> Iterator[Unit]:
    members = dict.fromkeys(member_of(inner) for module in modules for inner in module.modules())
    return (member.unit for member in members if member is not None)


def _check_ignored(modules: list[nn.Module], units: list[Unit], ignored: set[nn.Parameter]) -> None:
    if not units:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"{type(modules[0]).__name__} has no unit, but there are {dist.get_world_size()} ranks; call "
                "fully_shard before TokenLoss"
            )
        return
    managed = {
        id(param) for unit in units for both in unit.params for param in (both.sharded, both.unsharded)
    }
    for module in modules:
        for name, param in module.named_parameters():
            if param.requires_grad and id(param) not in managed and param not in ignored:
                raise ValueError(
                    f"{name} is trained but in no unit, so its gradient is not summed over ranks; shard it, or sum its "
                    "gradient in each step (ReduceOp.SUM) and pass it in ignored_params"
                )


def _token_groups(units: list[Unit], mesh: DeviceMesh | None) -> tuple[list[dist.ProcessGroup], torch.device]:
    """The process groups over which a sum, one after another, has each rank's tokens once; and their device."""
    datas: dict[DataMesh, str] = {}
    for unit in units:
        for group in unit.groups:
            datas.setdefault(group.plan.data, group.name)
    for unit in units if not datas else []:  # a stage without parameters
        datas.setdefault(unit.data, unit.name)
    if not datas:
        return [], CPU
    widest = max(datas, key=lambda data: (data.mesh.size(), -data.mesh.ndim))
    if mesh is not None:
        _check_mesh(mesh, widest, units)
    counted = widest.mesh if mesh is None else mesh
    ranks, dense = _ranks(counted), _under_tensor_parallelism(widest, units)
    if dense is not None and mesh is None:
        raise ValueError(
            f"the gradient of {dense.name} is summed over {list_ranks(_ranks(dense.data.mesh))}, those of others over "
            f"{list_ranks(ranks)}; pass as mesh= the mesh of all ranks that have different tokens (those of tensor "
            "parallelism have the same)"
        )
    same_tokens = dense is not None and _ranks(dense.data.mesh) == ranks  # on the further ranks of others
    for data, name in datas.items():
        own = set(_ranks(data.mesh))
        if not own <= set(ranks) and not (same_tokens and own > set(ranks)):
            raise ValueError(
                f"gradients of {name} are summed over {list_ranks(_ranks(data.mesh))}, but the tokens of "
                f"{list_ranks(ranks)} would be counted; pass as mesh= the mesh of all ranks that have "
                "different tokens"
            )
    groups = [group for group in counted.get_all_groups() if group.size() > 1]
    return groups, widest.device


def _under_tensor_parallelism(widest: DataMesh, units: list[Unit]) -> Param | None:
    """A whole parameter on fewer ranks than others and next to cut ones, such as a norm; None if there is none.

    Under expert parallelism parameters are on fewer ranks than others too, but those are experts, all of them cut.
    """
    by_cut: dict[bool, Param] = {}
    for param in (param for unit in units for param in unit.params):
        if param.data.mesh.size() < widest.mesh.size():
            others = () if param.other is None else param.other.placements
            by_cut[any(not placement.is_replicate() for placement in others)] = param
    return by_cut[False] if len(by_cut) == 2 else None


def _check_mesh(mesh: DeviceMesh, widest: DataMesh, units: list[Unit]) -> None:
    """Raise if tokens of more ranks would be counted than contribute to a parameter's gradient."""
    if mesh.size() <= widest.mesh.size():
        return
    for unit in units:
        for param in unit.params:
            if param.other is None:
                raise ValueError(
                    f"mesh= has {mesh.size()} ranks, but the gradient of {param.name} is summed over "
                    f"{list_ranks(_ranks(param.data.mesh))} only; pass the mesh that it is sharded over"
                )


def _ranks(mesh: DeviceMesh) -> list[int]:
    return sorted(mesh.mesh.flatten().tolist())

"""Our runtime with one of its ideas taken away: what the ablation compares. Nothing of this is in the product.

    staged          zero-copy off: a gather lands in a staging buffer and is copied out; gradients are copied into one
    held            gradients not fused: they stay where autograd made them until the unit's backward is over
    given-order     planner off: one buffer, tensors in the order of the module, the least shard size that this allows
    lcm             planner off: as above, the shard size a multiple of the lcm of all blocks, as Megatron-FSDP lays out
    gathering       blocks ignored: cut anywhere, so that a block-wise optimizer must gather weights and gradients first

Each is the runtime itself with a seam of it exchanged while this trainer builds or runs.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from .systems import Job, Trainer, _ours, make_optimizers


def staged(name: str, model: Any, job: Job) -> Trainer:
    """Every collective through a staging buffer of the gathered size, as a runtime without one flat buffer needs."""
    from contextlib import ExitStack

    from dbuffer import _direct
    from dbuffer import _torch_compat as compat

    def staged_gather(gather: Any) -> Any:
        def run(pairs: Any, group: Any) -> Any:
            staging = []
            for receive, send in pairs:
                whole = receive.new_empty(receive.shape)
                own = whole.narrow(0, group.rank() * send.numel(), send.numel())
                own.copy_(send)  # copy in
                staging.append((whole, own))
            work = gather(staging, group)

            def copy_out() -> None:
                for (receive, _), (whole, _) in zip(pairs, staging, strict=True):
                    receive.copy_(whole)

            return _After(work, copy_out)

        return run

    def staged_scatter(scatter: Any) -> Any:
        def run(pairs: Any, how: Any, group: Any) -> Any:
            staging = [(receive, send.clone()) for receive, send in pairs]
            return _After(scatter(staging, how, group), staging.clear)

        return run

    def patched() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for way in (compat, _direct):  # by a collective, or from rank to rank
            through = {
                "all_gather": staged_gather(way.all_gather),
                "reduce_scatter": staged_scatter(way.reduce_scatter),
            }
            stack.enter_context(mock.patch.multiple(way, **through))
        return stack

    return _within(_ours(name, model, job), patched)


def held(name: str, model: Any, job: Job) -> Trainer:
    """All gradients of a unit are copied into the buffer together, just before their reduction, as FSDP2 does."""
    from fsdp_runtime._gradients import Gradients

    write, close = Gradients.write, Gradients.close
    kept: dict[int, list[tuple[Any, Any, float]]] = {}

    def keep(gradients: Any, param: Any, grad: Any, scale: float) -> None:
        kept.setdefault(id(gradients), []).append((param, grad, scale))
        gradients._written.add(param.name)

    def flush(gradients: Any) -> Any:
        waiting = kept.pop(id(gradients), [])
        for param, _, _ in waiting:
            gradients._written.discard(param.name)
        for param, grad, scale in waiting:
            write(gradients, param, grad, scale)
        waiting.clear()
        return close(gradients)

    return _within(_ours(name, model, job), lambda: mock.patch.multiple(Gradients, write=keep, close=flush))


class _After:
    """Work with something to do when it is waited for."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self._work, self._then = work, then

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        self._then()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _within(trainer: Trainer, context: Callable[[], AbstractContextManager[Any]]) -> Trainer:
    forward, backward, update = trainer.forward, trainer.backward, trainer.update

    def inside(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with context():
                return call(*args)

        return run

    trainer.forward, trainer.backward, trainer.update = inside(forward), inside(backward), inside(update)
    return trainer


def given_order(name: str, model: Any, job: Job) -> Trainer:
    """Tensors where the module has them."""
    return _planned(
        name, model, job, lambda items, align: max(items, key=lambda i: i.spec.numel).step or align
    )


def lcm(name: str, model: Any, job: Job) -> Trainer:
    """The same, and a shard size that every block divides."""
    return _planned(
        name, model, job, lambda items, align: math.lcm(align, *(i.step or i.spec.grid.period for i in items))
    )


def _planned(name: str, model: Any, job: Job, step: Callable[[Any, int], int]) -> Trainer:
    from fsdp_runtime import _group

    def plan(specs: Sequence[Any], world_size: int, *, align: int = 8, **options: Any) -> Any:
        return layout_in_order(specs, world_size, align, step)

    with mock.patch.object(_group, "plan", plan):
        return _ours(name, model, job)


def layout_in_order(
    specs: Sequence[Any], world_size: int, align: int, step: Callable[[Any, int], int]
) -> Any:
    """One buffer, tensors in the given order, each at its earliest start; the least fitting multiple of `step`."""
    from layout_planner import Layout, Segment
    from layout_planner._place import Item, placer

    items = [Item.of(index, spec, align) for index, spec in enumerate(specs)]
    unit = step(items, align)
    total = sum(item.size for item in items)
    for shard in itertools.count(-(-total // (world_size * unit)) * unit, unit):
        offsets, end = [], 0
        for item in items:
            start = placer(item, shard)(end)
            if start < 0 or start + item.spec.numel > world_size * shard:
                break
            offsets.append(start)
            end = start + item.size
        else:
            names = tuple(spec.name for spec in specs)
            return Layout(tuple(specs), world_size, align, (Segment(shard, names, tuple(offsets)),))
    raise AssertionError("a shard size always exists: all tensors in one shard")


def gathering(name: str, model: Any, job: Job) -> Trainer:
    """The optimizer sees whole tensors: it gathers weights and gradients of a unit, steps, and keeps its own part."""
    import torch

    options = {key: value for key, value in job.options.items() if key != "block_policy"}
    trainer = _ours(name, model, Job(**{**vars(job), "optimizer": "adamw", "options": options}))
    sharded = list(trainer.module.parameters())
    whole = [torch.nn.Parameter(p.full_tensor().detach().clone()) for p in sharded]
    trainer.optimizers = make_optimizers(torch.nn.ParameterList(whole), job)

    def update() -> None:
        with torch.no_grad():
            for full, part in zip(whole, sharded, strict=True):
                full.copy_(part.full_tensor())
                full.grad = part.grad.full_tensor()
            for optimizer in trainer.optimizers:
                optimizer.step()
            for full, part in zip(whole, sharded, strict=True):
                dims = part.placements[0]
                part.to_local().copy_(_own_part(full.detach(), part, dims))
                part.grad = full.grad = None

    trainer.update = update
    return trainer


def _own_part(full: Any, part: Any, placement: Any) -> Any:
    """This rank's run of a whole tensor."""
    import torch.distributed as dist

    local = part.to_local()
    units = placement.local_units
    prefix = math.prod(full.shape[: len(placement.dims)])
    start = prefix // sum(units) * sum(units[: dist.get_rank()])
    return full.reshape(prefix, *full.shape[len(placement.dims) :])[start : start + len(local)].view_as(local)

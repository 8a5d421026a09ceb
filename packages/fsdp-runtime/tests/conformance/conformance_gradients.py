"""Cases: gradients, their scaling and hooks, and how microbatches add up."""

import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from conformance_models import (
    MLP,
    all_sharded,
    assert_same,
    assert_same_gradients,
    backward_both,
    batch,
    check_backward,
    close,
    full,
    hsdp_mesh,
    inputs,
    is_sharded,
    mean_square,
    mesh,
    mine,
    pair,
    seeded,
    world,
)
from conformance_registry import Raises, case, refusal
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ragged_shard.testing import record_collectives

GRADIENTS = "Gradients"


def units(model):
    return [m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")]


def divide(fsdp, force, meshes):
    for over in meshes:
        for factor in (1.0, 6.0):
            model, reference = pair(fsdp, mesh=over)
            for unit in units(model):
                unit.set_gradient_divide_factor(factor)
                unit.set_force_sum_reduction_for_comms(force)
            check_backward(model, reference, scale=world() / factor)


@case(GRADIENTS, "`param.grad`: the mean over ranks, in the parameter's layout and dtype", ranks=3)
def gradient(fsdp):
    model, reference = pair(fsdp)
    backward_both(model, reference)
    for name, p in model.named_parameters():
        assert type(p.grad) is type(p.data), name
        assert p.grad.placements == p.placements, name
        assert p.grad.device_mesh == p.device_mesh, name
        assert p.grad.dtype == p.dtype, name
        assert p.grad.to_local().shape == p.to_local().shape, name
    assert_same_gradients(model, reference)


@case(
    GRADIENTS, "gradients of backwards without `zero_grad` add up, also with `set_is_last_backward`", ranks=3
)
def no_zero_grad(fsdp):
    model, reference = pair(fsdp)
    for step in range(3):
        check_backward(model, reference, step)
    for step in range(3):
        model.set_is_last_backward(step == 2)
        backward_both(model, reference, step)
    assert_same_gradients(model, reference)
    model.zero_grad(set_to_none=False)
    assert all((full(p.grad) == 0).all() for p in model.parameters())
    reference.zero_grad()
    check_backward(model, reference, 2)


@case(GRADIENTS, "post-accumulate-grad hooks run once per backward, with the reduced gradient")
def accumulate_hooks(fsdp):
    model, reference = pair(fsdp)
    calls: dict = {name: [] for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: calls[name].append(p.grad.to_local().clone())
        )
    check_backward(model, reference)
    for name, p in model.named_parameters():
        assert len(calls[name]) == 1, name
        assert torch.equal(calls[name][0], p.grad.to_local()), name


@case(GRADIENTS, "an optimizer per parameter that steps in its hook")
def optimizer_in_backward(fsdp):
    model, reference = pair(fsdp)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, foreach=False) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for i in range(3):
        backward_both(model, reference, i)
        plain.step()
        plain.zero_grad()
    assert_same(model, reference)


@case(
    GRADIENTS, "`set_gradient_divide_factor` with sums forced, for one unit; with HSDP over both dimensions", ranks=4,
)  # fmt: skip
def divide_factor_sum(fsdp):
    divide(fsdp, True, (mesh(), hsdp_mesh()))


@case(
    GRADIENTS, "`set_gradient_divide_factor`", ranks=3, fsdp2=Raises(RuntimeError, "PREMUL_SUM"), ours=None,
    note="gloo has no such reduction",
)  # fmt: skip
def divide_factor(fsdp):
    divide(fsdp, False, (mesh(),))


@case(GRADIENTS, "`set_reduce_scatter_divide_factor`, deprecated, is the same with a warning")
def old_divide_factor(fsdp):
    model, reference = fsdp.fully_shard(seeded(MLP), mesh=mesh()), seeded(MLP)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_reduce_scatter_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    assert any("set_gradient_divide_factor" in str(w.message) for w in caught)
    check_backward(model, reference, scale=world())


@case(GRADIENTS, "`set_force_sum_reduction_for_comms`: the same gradients", ranks=3)
def force_sum(fsdp):
    for low in (None, torch.float16):
        policy = fsdp.MixedPrecisionPolicy(reduce_dtype=low)
        model, reference = pair(fsdp, mp_policy=policy)
        for unit in units(model):
            unit.set_force_sum_reduction_for_comms(True)
        tolerance: Any = {} if low is None else {"rtol": 5e-3, "atol": 1e-4}
        check_backward(model, reference, **tolerance)


@case(
    GRADIENTS,
    "`set_all_reduce_hook`: gets each unit's reduced shard, with HSDP after the all-reduce, and may change it",
    ranks=4,
)
def all_reduce_hook(fsdp):
    for over in (mesh(), hsdp_mesh()):
        model, reference = pair(fsdp, mesh=over)
        sizes: list[int] = []

        def hook(reduced, sizes=sizes):
            assert not is_sharded(reduced)
            sizes.append(reduced.numel())
            reduced.mul_(2)

        for unit in units(model):
            unit.set_all_reduce_hook(hook)
        check_backward(model, reference, scale=2)
        assert len(sizes) == 4
        assert sum(sizes) >= sum(p.to_local().numel() for p in model.parameters())


@case(
    GRADIENTS,
    "`set_custom_all_gather`: called once per gather, on memory that it allocated",
    note="copies into and out of that memory, as FSDP2 always does",
)
def custom_all_gather(fsdp):
    class Mine(AllGather):
        calls = 0

        def allocate(self, size, *, dtype, device):
            self.allocated = torch.empty(*size, dtype=dtype, device=device)
            return self.allocated

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            Mine.calls += 1
            assert not async_op
            assert output_tensor.data_ptr() == self.allocated.data_ptr()
            own = output_tensor.chunk(group.size())[group.rank()]
            assert input_tensor.data_ptr() == own.data_ptr()
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    model, reference = fsdp.fully_shard(seeded(MLP), mesh=mesh()), seeded(MLP)
    model.set_custom_all_gather(Mine())
    x = torch.randn(2, 8)
    close(model(x), reference(x), "output")
    assert Mine.calls == 1


@case(
    GRADIENTS,
    "`set_custom_reduce_scatter`: called once per reduction, on memory that it allocated",
    note="copies into and out of that memory, as FSDP2 always does",
)
def custom_reduce_scatter(fsdp):
    class Mine(ReduceScatter):
        calls = 0

        def __init__(self):
            self.allocated = []

        def allocate(self, size, *, dtype, device):
            self.allocated.append(torch.empty(*size, dtype=dtype, device=device))
            return self.allocated[-1]

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            Mine.calls += 1
            given, reduced = self.allocated
            assert (input_tensor.data_ptr(), output_tensor.data_ptr()) == (
                given.data_ptr(),
                reduced.data_ptr(),
            )
            assert input_tensor.numel() == group.size() * output_tensor.numel()
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )

    model, reference = fsdp.fully_shard(seeded(MLP), mesh=mesh()), seeded(MLP)
    model.set_custom_reduce_scatter(Mine())
    check_backward(model, reference)
    assert Mine.calls == 1


@case(GRADIENTS, "`set_reduce_scatter_max_input_buffers(2)`: the same gradients; below 1 is refused")
def max_input_buffers(fsdp):
    model, reference = pair(fsdp)
    model.set_reduce_scatter_max_input_buffers(2)
    for wrong, error in ((0, ValueError), (True, TypeError), (1.5, TypeError)):
        try:
            model.set_reduce_scatter_max_input_buffers(wrong)
        except error:
            continue
        raise AssertionError(f"{wrong!r} was taken")
    check_backward(model, reference)


@case(GRADIENTS, "`set_separate_reduce_scatter_group`: gradients use another process group")
def separate_group(fsdp):
    model, reference = pair(fsdp)
    made, usual = [], dist.new_group

    def new_group(*arguments, **options):
        made.append(usual(*arguments, **options))
        return made[-1]

    with mock.patch.object(dist, "new_group", new_group):
        model.set_separate_reduce_scatter_group(True)
        model.set_separate_reduce_scatter_group(True)
    assert [dist.get_process_group_ranks(group) for group in made] == [list(range(dist.get_world_size()))]
    check_backward(model, reference)
    model.set_separate_reduce_scatter_group(False)
    backward_both(model, reference)


refusal(
    GRADIENTS, "`set_allocate_memory_from_process_group_for_comm`",
    lambda fsdp: fsdp.fully_shard(MLP(), mesh=mesh()).set_allocate_memory_from_process_group_for_comm(True), None,
    Raises(NotImplementedError, "set_allocate_memory_from_process_group_for_comm"),
    note="gloo has no allocator to test it with",
)  # fmt: skip


@case(
    GRADIENTS, "`set_symm_mem_for_comm`, over NCCL", fsdp2=Raises(RuntimeError, "SymmetricMemory"),
    ours=Raises(NotImplementedError, "set_symm_mem_for_comm"), unsupported=True, refusal=True,
    note="only NCCL on several GPUs could test it",
)  # fmt: skip
def symmetric_memory(fsdp):
    model, reference = pair(fsdp)
    model.set_symm_mem_for_comm("NCCL")
    x = torch.randn(4, 8)
    close(model(x), reference(x), "output")


@case(GRADIENTS, "`set_post_optim_event`: gathers wait for that event, not the current stream")
def post_optim_event(fsdp):
    model, reference = pair(fsdp)
    model.set_post_optim_event(None)
    x = torch.randn(4, 8)
    close(model(x), reference(x), "output")


MULTI = "Accumulation and microbatches"


@case(MULTI, "`set_requires_gradient_sync(False)`: gradients add up until it is on again", ranks=3)
def no_sync(fsdp):
    for reshard in (True, False):
        model, reference = pair(fsdp, reshard_after_forward=reshard)
        for step in range(2):
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                with record_collectives() as record:
                    backward_both(model, reference, 10 * step + micro)
                assert record.kinds.count("reduce_scatter") == (4 if micro == 2 else 0), record.kinds
                if micro < 2 and step == 0:
                    assert all(p.grad is None for p in model.parameters())
                assert all_sharded(model)
            assert_same_gradients(model, reference)
            for one in (model, reference):
                one.zero_grad()


@case(MULTI, "`set_requires_gradient_sync(False, recurse=False)` holds for this unit alone")
def no_sync_here(fsdp):
    model, reference = pair(fsdp)
    model.set_requires_gradient_sync(False, recurse=False)
    backward_both(model, reference)
    assert model.head.weight.grad is None
    assert_same_gradients(model.blocks, reference.blocks)
    model.set_requires_gradient_sync(True)
    check_backward(model, reference)


@case(MULTI, "`set_reshard_after_backward(False)` between microbatches saves gathers")
def no_sync_no_reshard(fsdp):
    model, reference = pair(fsdp, reshard_after_forward=False)
    for micro in range(3):
        last = micro == 2
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        with record_collectives() as record:
            backward_both(model, reference, micro)
        assert record.kinds.count("all_gather") == (4 if micro == 0 else 0), record.kinds
    assert_same_gradients(model, reference)
    assert all_sharded(model)


@case(
    MULTI, "HSDP: a reduce-scatter and an all-reduce over the replicas per unit; `set_requires_all_reduce(False)`: "
    "reduce-scattered and added up, all-reduced at the last", ranks=4,
)  # fmt: skip
def no_all_reduce(fsdp):
    model, reference = pair(fsdp, mesh=hsdp_mesh())
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        with record_collectives() as record:
            backward_both(model, reference, micro)
        assert record.kinds.count("reduce_scatter") == 4, record.kinds
        replicated = [e for e in record.events if e.kind == "all_reduce" and e.bytes_sent >= 64]
        assert len(replicated) == (4 if micro == 2 else 0), record.kinds
        assert {event.ranks for event in record.events} == {2}
    assert_same_gradients(model, reference)


@case(MULTI, "`set_is_last_backward(False)` between microbatches (1F1B)", ranks=3)
def last_backward(fsdp):
    model, reference = pair(fsdp)
    wholes = [batch(i) for i in range(3)]
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    losses = [mean_square(model, mine(whole)) for whole in wholes[:2]]
    losses[0].backward()
    losses.append(mean_square(model, mine(wholes[2])))
    losses[1].backward()
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    losses[2].backward()
    for whole in wholes:
        mean_square(reference, whole).backward()
    assert_same_gradients(model, reference)


@case(MULTI, "a chunked loss: the last module of a list unit is called several times")
def chunked_loss(fsdp):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = MLP(), nn.LayerNorm(8), nn.Linear(8, 5)

        def forward(self, x):
            return self.norm(self.body(x))

    model, reference = seeded(Model), seeded(Model)
    fsdp.fully_shard(model.body, mesh=mesh())
    fsdp.fully_shard([model.norm, model.head], mesh=mesh(), reshard_after_forward=False)
    fsdp.fully_shard(model, mesh=mesh())
    for _step in range(2):
        for one, x in inputs(model, reference):
            hidden = one(x)
            leaf = hidden.detach().requires_grad_()
            for chunk in leaf.chunk(2):
                (one.head(chunk).square().mean() / 2).backward()
            hidden.backward(leaf.grad)
        assert_same_gradients(model, reference)


@case(
    MULTI, "`set_manual_backward_finalization(True)`: `finalize_backward` reduces once after several backwards",
    ranks=3, new=(2, 15),
)  # fmt: skip
def finalized_by_hand(fsdp):
    for async_op in (False, True):
        model, reference = pair(fsdp)
        model.set_manual_backward_finalization(True)
        model.finalize_backward()  # no step has begun
        model.set_requires_gradient_sync(False)
        with record_collectives() as record:
            for micro in range(3):
                backward_both(model, reference, micro)
        assert "reduce_scatter" not in record.kinds
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        with record_collectives() as record:
            handle = model.finalize_backward(async_op=async_op)
            if async_op:
                assert isinstance(handle, fsdp.GradientReductionHandle)
                handle.wait()
        assert record.kinds.count("reduce_scatter") == 4, record.kinds
        assert_same_gradients(model, reference)


@case(
    MULTI, "`GradientReductionHandle.wait` after `reset_iter_state`", new=(2, 15),
    fsdp2=Raises(RuntimeError, "invalidated|reset_iter_state"),
)  # fmt: skip
def waited_after_a_reset(fsdp):
    model, reference = pair(fsdp)
    model.set_manual_backward_finalization(True)
    backward_both(model, reference)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    handle.wait()

"""A training step passes a simulated capture, which refuses what CUDA graphs refuse."""

from contextlib import nullcontext

import pytest
import torch
from runtime_helpers import BF16, Net, device, loss_of, mesh_of, seeded, shard

from dbuffer import Gather
from fsdp_runtime import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp_runtime.memory import SelectiveOffloadPolicy

BATCH = torch.arange(10).view(2, 5)  # does not move: a graph reads its inputs where they were


def captured_steps(found, model, steps=3):
    """The addresses that each captured step uses of memory from before, after two steps that are not captured."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []

    def step():
        loss_of(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    for _ in range(steps):
        with found.capture() as addresses:
            step()
        seen.append(addresses)
    return seen


@pytest.mark.parametrize(("precision", "shape"), [(MixedPrecisionPolicy(), (4,)), (BF16, (2, 2))])
def test_a_step_can_be_captured_and_uses_the_same_addresses_each_time(precision, shape):
    with device("at random") as found:
        model = shard(seeded(Net), mesh=mesh_of(*shape), mp_policy=precision)
        first, *others = captured_steps(found, model)
        assert len(first) > 30
        assert all(addresses == first for addresses in others)


def test_steps_outside_follow_a_captured_one_with_the_same_losses():
    def losses(captured):
        with device("at random") as found:
            model = shard(seeded(Net), mesh=mesh_of(4), mp_policy=BF16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            seen = []
            for step in range(4):
                with found.capture() if step in captured else nullcontext():
                    loss = loss_of(model, BATCH)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.synchronize()
                seen.append(loss.item())
            return seen

    assert losses({1, 2}) == losses(set())


def gathers_of(act):
    """How many units an action gathers."""
    count, start = 0, Gather.start

    def counted(*args, **options):
        nonlocal count
        count += 1
        return start(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gather, "start", counted)
        act()
    return count


def test_what_a_graph_has_gathered_is_shared_inside_of_it_and_gathered_again_outside():
    for microbatches in (1, 2):
        with device() as found:
            model = shard(seeded(Net), mesh=mesh_of(4), reshard_after_forward=False)

            def step(model=model):
                loss_of(model, BATCH).backward()

            alone = gathers_of(step)
            model.set_reshard_after_backward(False)
            with found.capture():
                assert gathers_of(step) == alone
                if microbatches == 2:
                    model.set_reshard_after_backward(True)
                    assert gathers_of(step) == 0
            if microbatches == 1:
                assert gathers_of(step) == alone  # a capture runs nothing: no value is there yet
                assert gathers_of(step) == 0


def test_kept_storage_has_one_address_in_and_outside_of_graphs():
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4), mp_policy=BF16)
        model.set_keep_unsharded_storage(True)
        model.set_reduce_scatter_unused_params(True)
        seen: list[int] = []
        model.blocks[1].register_forward_pre_hook(lambda module, _: seen.append(module.weight.data_ptr()))
        for captured in (False, True, False, True, True, False):
            with found.capture() if captured else nullcontext():
                loss_of(
                    model, BATCH, order=[0, 1, 0, 2, 1]
                ).backward()  # memory is written again within a pass
        assert len(seen) == 12
        assert len(set(seen)) == 1


def gathered(model, found):
    model.blocks[1].unshard()


def with_event(model, found):
    model.set_post_optim_event(found.record())


@pytest.mark.parametrize(
    ("prepare", "use", "message"),
    [
        (gathered, Net.__call__, r"blocks.1 is gathered: .* `reshard` before"),
        (gathered, lambda model, _: model.blocks[1].reshard(), "released inside it"),
        (with_event, Net.__call__, "set_post_optim_event: a graph cannot wait"),
    ],
)
def test_what_is_from_before_cannot_be_captured(prepare, use, message):
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4))
        prepare(model, found)
        with pytest.raises(RuntimeError, match=message), found.capture():
            use(model, BATCH)


def test_parameters_that_a_graph_uses_cannot_be_replaced_afterwards():
    with device() as simulated:
        model = shard(seeded(Net), mesh=mesh_of(4))
        with simulated.capture():
            loss_of(model, BATCH).backward()
        values = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(values)
        loss_of(model, BATCH)
        model.load_state_dict(values, assign=True)
        with pytest.raises(
            RuntimeError, match=r"were replaced, but a graph was captured .* copy values in place"
        ):
            loss_of(model, BATCH)


def test_offload_cannot_be_captured():
    message = r"(Net|blocks.0) is offloaded: .* a graph cannot capture"
    for where, policy in (("cpu:0", CPUOffloadPolicy()), ("cpu", SelectiveOffloadPolicy(gradients=True))):
        with device(device=where) as found:
            model = shard(seeded(Net), mesh=mesh_of(4), offload_policy=policy)
            with pytest.raises(RuntimeError, match=message), found.capture():
                model(BATCH)


def test_a_step_with_unused_parameters_can_be_captured_only_where_all_are_reduced():
    for all_reduced in (False, True):
        with device() as found:
            model = shard(seeded(Net), mesh=mesh_of(4))
            model.set_reduce_scatter_unused_params(all_reduced)
            model.blocks[1].forward = lambda x, block=model.blocks[1]: x @ block.weight.T
            refused = pytest.raises(RuntimeError, match=r"bias of blocks.1 got no gradient, and a graph")
            with nullcontext() if all_reduced else refused:
                captured_steps(found, model)

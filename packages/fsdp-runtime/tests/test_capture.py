"""A training step passes a simulated capture, which refuses what CUDA graphs refuse."""

from contextlib import nullcontext

import pytest
import torch
from runtime_helpers import BF16, Net, device, loss_of, mesh_of, seeded, shard

from fsdp_runtime import CPUOffloadPolicy, MixedPrecisionPolicy

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view")
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


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
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


def test_two_microbatches_of_one_capture_share_what_the_first_has_gathered():
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4), reshard_after_forward=False)
        loss_of(model, BATCH).backward()
        with found.capture():
            model.set_reshard_after_backward(False)
            loss_of(model, BATCH).backward()
            model.set_reshard_after_backward(True)
            loss_of(model, BATCH).backward()


def test_parameters_that_were_gathered_before_cannot_be_captured():
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4))
        model.blocks[1].unshard()
        with pytest.raises(RuntimeError, match=r"blocks.1 is gathered: .* `reshard` before"), found.capture():
            model(BATCH)
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4))
        model.blocks[1].unshard()
        with pytest.raises(RuntimeError, match="released inside it"), found.capture():
            model.blocks[1].reshard()


def test_offload_cannot_be_captured():
    with device(device="cpu:0") as found:
        model = shard(seeded(Net), mesh=mesh_of(4), offload_policy=CPUOffloadPolicy())
        with (
            pytest.raises(RuntimeError, match=r"(Net|blocks.0) is offloaded: .* a graph cannot capture"),
            found.capture(),
        ):
            model(BATCH)


def test_an_event_from_before_cannot_be_captured():
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4))
        model.set_post_optim_event(found.record())
        with pytest.raises(RuntimeError, match="set_post_optim_event: a graph cannot wait"), found.capture():
            model(BATCH)


def test_a_step_with_unused_parameters_can_be_captured_only_where_all_are_reduced():
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4))
        model.blocks[1].forward = lambda x: x @ model.blocks[1].weight.T
        with pytest.raises(RuntimeError, match=r"bias of blocks.1 got no gradient, and a graph"):
            captured_steps(found, model)
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4))
        model.set_reduce_scatter_unused_params(True)
        model.blocks[1].forward = lambda x: x @ model.blocks[1].weight.T
        captured_steps(found, model)

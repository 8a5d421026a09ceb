"""Ranks that run equal units in another order: torch's collectives mix their values up, and an error says so."""

import contextlib
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import Net, loss_of, seeded, shard, tokens
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import _order, _patient_calls
from ragged_shard.testing import on_ranks, rank_mesh

USUAL, OTHER = (0, 1, 2), (1, 0, 2)


def sharded(replicas=1):
    """On process groups of its own: what ranks know of each other's orders stays with the group."""
    if replicas == 1:
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    else:
        mesh = rank_mesh(replicas, dist.get_world_size() // replicas, names=("replicate", "shard"))
    return shard(seeded(Net), mesh=mesh)


def run(net, order=USUAL, evaluates=False):
    with torch.set_grad_enabled(not evaluates):
        loss = loss_of(net, tokens(), order=order)
    if not evaluates:
        loss.backward()


def error_of(call):
    with mock.patch.object(_patient_calls, "_DOUBT", 0.3), mock.patch.object(_order, "_ASKING", 0.3):
        try:
            call()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
@on_ranks("ranks")
def test_another_order_in_the_first_step_is_an_error_on_every_rank(ranks, replicas):
    """Odd ranks run their blocks in another order from the start."""
    message = error_of(lambda: run(sharded(replicas), OTHER if dist.get_rank() % 2 else USUAL))
    assert re.search(rf"order of collectives: .*rank {dist.get_rank()} start(ed|s) \w+ of ", message)


def last_pass(evaluates, known=(USUAL,)):
    """Rank 1 leaves the order in the last pass before a save, or in an evaluation; this rank's error in it."""
    net = sharded()
    net.set_prefetch_depth(0)  # else blocks are gathered in the usual order, and nothing is wrong
    for order in (USUAL, *known):
        for evaluation in (False, True):
            run(net, order, evaluation)
    return error_of(lambda: run(net, OTHER if dist.get_rank() == 1 else USUAL, evaluates))


@pytest.mark.parametrize("evaluates", [False, True])
@on_ranks(3)
def test_every_rank_raises_in_the_pass_in_which_one_leaves_the_order(evaluates):
    started = f"rank {dist.get_rank()} started all_gather of blocks.{int(dist.get_rank() == 1)}"
    assert f"collectives: {started} where rank" in last_pass(evaluates)
    assert "do not agree on the order" in last_pass(evaluates, (OTHER, USUAL))


@on_ranks(3)
def test_an_order_that_changes_on_all_ranks_and_a_failed_forward_are_no_errors():
    """All ranks change the order, back and forth, train and evaluate; gradients are accumulated."""
    net = sharded()
    hook = net.norm.register_forward_hook(lambda *_: 1 / 0 if dist.get_rank() == 1 else None)
    with contextlib.suppress(ZeroDivisionError):
        net(tokens())
    hook.remove()
    for order in (USUAL, OTHER, (2, 1, 0), OTHER, USUAL):
        run(net, order, evaluates=True)
        for last in (False, True):
            net.set_requires_gradient_sync(last)
            run(net, order)


@on_ranks(3)
def test_ranks_that_train_different_parameters_raise_in_the_first_forward():
    net = sharded()
    if dist.get_rank() == 1:
        net.blocks[1].bias.requires_grad_(False)
    message = error_of(lambda: run(net))
    assert "blocks.1, which trains weight, bias" in message
    assert re.search(r"blocks\.1, which trains weight[;,]", message)

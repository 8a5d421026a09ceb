"""Ranks that hold the same parameters, as under DDP, divide the work on them; `test_layouts` compares the bits.

`pytest -s` on this file prints bytes of state and what a step sends, next to sharded parameters.
"""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import run_of

from layout_planner import Elements
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

WIDE = ((64, 32), (32, 64))
ELEMENTS = 2 * 64 * 32
OPTIONS: dict[str, dict[str, Any]] = {"AdamW8bit": {"block": Elements(16)}}


def cost(name, layout):
    """This rank's bytes of state, and of updates and gradients that a step sends."""
    logging.getLogger("block_optim").setLevel(logging.ERROR)
    run = run_of(name, layout, shapes=WIDE, **OPTIONS.get(name, {})).steps(0, 1)
    run.give(1)
    with record_collectives() as record:
        run.optimizer.step(grad_norm=1.0)
    state = sum(n for key, n in run.optimizer.state_bytes().items() if key not in ("step", "format"))
    if name == "Muon":
        # Each rank computes one of the matrices.
        assert len(set(run.optimizer.assignment.domains[0].loads)) == 1
    return state, sum(e.bytes_sent for e in record.events if e.kind != "all_reduce"), record.kinds


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Muon", "Shampoo", "SOAP"])
def test_replicas_divide_what_is_done_by_matrix_and_send_each_update_once(name):
    replicas, shards = run_ranks(2, cost, name, "replicate"), run_ranks(2, cost, name, "shard")
    print(f"\n| `{name}` | {replicas[0][0]} | {replicas[0][1]} | {shards[0][0]} | {shards[0][1]} |", end="")
    everything = sum(state for state, _, _ in shards)
    if name.startswith("AdamW"):
        assert replicas == [(everything, 0, [])] * 2
        return
    assert all(kinds == ["all_reduce", "all_gather"] for _, _, kinds in replicas)
    update = {"Muon": 2, "Shampoo": 4, "SOAP": 4}[name]  # bytes: of bf16, or the dtype of the computation
    assert sum(sent for _, sent, _ in replicas) == update * ELEMENTS
    if name == "Muon":  # momentum stays next to the gradient
        assert all(state == everything for state, _, _ in replicas)
    else:
        assert [state for state, _, _ in replicas] == [everything // 2] * 2
    assert (shards[0][1] > 0) == (name == "Muon")  # the others' blocks are whole under these cuts


@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
@on_ranks(3)
def test_a_gradient_that_one_rank_lacks_is_an_error_on_every_rank(name):
    run = run_of(name, "replicas").steps(0, 1)
    before = [p.detach().clone() for p in run.params]
    with pytest.raises(ValueError, match="p1: some ranks have a gradient and others none"):
        run.step(2, without=(1,) if dist.get_rank() == 2 else ())
    assert all(map(torch.equal, before, run.params))

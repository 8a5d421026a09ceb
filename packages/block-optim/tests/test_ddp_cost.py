"""What replicated parameters (DDP) cost next to sharded ones: bytes of state, and what a step sends; printed by -s."""

import logging
from typing import Any

import pytest
from runs import run_of

from layout_planner import Elements
from ragged_shard.testing import record_collectives, run_ranks

SHAPES = ((64, 32), (32, 64))
ELEMENTS = 2 * 64 * 32
OPTIONS: dict[str, dict[str, Any]] = {"AdamW8bit": {"block": Elements(16)}, "Shampoo": {"momentum": 0.0}}


def cost(name, layout):
    """This rank's bytes of state, and of updates and gradients that a step sends."""
    logging.getLogger("block_optim").setLevel(logging.ERROR)
    run = run_of(name, layout, shapes=SHAPES, **OPTIONS.get(name, {})).steps(0, 1)
    run.give(1)
    with record_collectives() as record:
        run.optimizer.step(grad_norm=1.0)
    state = sum(n for key, n in run.optimizer.state_bytes().items() if key != "step")
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
    update = {"Muon": 2, "Shampoo": 4, "SOAP": 4}[
        name
    ]  # bytes an element: bf16, or the dtype of the computation
    assert sum(sent for _, sent, _ in replicas) == update * ELEMENTS
    if name == "Muon":  # momentum stays next to the gradient
        assert all(state == everything for state, _, _ in replicas)
    else:
        assert sum(state for state, _, _ in replicas) == everything
    assert (shards[0][1] > 0) == (name == "Muon")  # the others' blocks are whole under these cuts

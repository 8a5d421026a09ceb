"""What Replicate (plain DDP) costs next to a sharded layout: bytes of state, and what a step sends."""

import logging

import pytest
from runs import Run
from test_presence import KINDS

from ragged_shard.testing import record_collectives, run_ranks

SHAPES = ((64, 32), (32, 64))


def cost(name, layout):
    logging.getLogger("block_optim").setLevel(logging.ERROR)
    kind, options = KINDS[name]
    run = Run(kind, layout, shapes=SHAPES, lr=0.1, **options).steps(0, 1)
    run.give(1)
    with record_collectives() as record:
        run.optimizer.step(grad_norm=1.0)
    state = sum(n for key, n in run.optimizer.state_bytes().items() if key != "step")
    return state, sum(e.bytes_sent for e in record.events if e.kind == "all_to_all"), record.kinds


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Muon", "Shampoo", "SOAP"])
def test_replicas_keep_all_states_and_send_nothing_shards_keep_their_own(name):
    replicas, shards = run_ranks(2, cost, name, "replicate"), run_ranks(2, cost, name, "shard")
    print(
        f"{name:10} Replicate {replicas[0][0]} B a rank, 0 B sent; Shard(0) {shards[0][0]} B, {shards[0][1]} B sent"
    )
    for state, sent, kinds in replicas:
        assert (sent, kinds) == (0, [])
        assert state == sum(other for other, _, _ in shards)
    assert (shards[0][1] > 0) == (name == "Muon")  # the others' blocks are whole under these cuts

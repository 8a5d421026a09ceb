import random

import pytest
import torch
from runs import full, placed, tensors, world_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import distribute_tensor as torch_distribute

from block_optim import qk_clip_
from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.testing import on_ranks, record_collectives

HEADS, KEY_HEADS, ROWS, DIM = 4, 2, 3, 5


def attention_logits(x, w_q, w_k):
    """The largest logit of each query head; keys are shared by consecutive query heads."""
    q = (x @ w_q.T).view(len(x), HEADS, -1)
    k = (x @ w_k.T).view(len(x), -1, q.size(-1)).repeat_interleave(HEADS // (len(w_k) // q.size(-1)), 1)
    return torch.einsum("ihd,jhd->hij", q, k).amax((1, 2))


@pytest.mark.parametrize("key_heads", [HEADS, KEY_HEADS])
@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0, 0.3])
def test_logits_above_tau_come_down_to_it_and_others_stay(key_heads, alpha):
    x, w_q, w_k = tensors([(30, DIM), (HEADS * ROWS, DIM), (key_heads * ROWS, DIM)], 0)
    before = attention_logits(x, w_q, w_k)
    tau = float(before.median())
    eta = qk_clip_(w_q, w_k, before, tau=tau, alpha=alpha)
    torch.testing.assert_close(eta, (tau / before).clamp(max=1))
    after = attention_logits(x, w_q, w_k)
    assert (after <= tau * 1.0001).all()
    if key_heads == HEADS:
        torch.testing.assert_close(after, before.clamp(max=tau), rtol=1e-4, atol=1e-5)


def test_each_head_of_both_weights_or_of_one_is_scaled_by_its_own_rows_factor():
    logits, weights = torch.tensor([50.0, 400.0, 100.0, 10000.0]), torch.ones(4, HEADS * ROWS, DIM)
    qk_clip_(weights[0], weights[1], logits)
    qk_clip_(weights[2], None, logits)
    qk_clip_(None, weights[3], logits)
    want = torch.tensor([1.0, 0.5, 1.0, 0.1]).repeat_interleave(ROWS)[:, None]
    torch.testing.assert_close(weights, want.expand_as(weights))
    assert weights[:, :ROWS].eq(1).all()


def test_grouped_keys_take_the_smallest_factor_of_their_query_heads():
    w_k = torch.ones(KEY_HEADS * ROWS, DIM)
    qk_clip_(torch.ones(HEADS * ROWS, DIM), w_k, torch.tensor([50.0, 400.0, 100.0, 100.0]))
    assert w_k[:ROWS].eq(0.5).all()
    assert w_k[ROWS:].eq(1).all()


def test_mla_scales_rotary_queries_by_eta_and_leaves_values():
    nope, rope, value = 3, 2, 4
    w_q, w_kv = torch.ones(2 * (nope + rope), DIM), torch.ones(2 * (nope + value), DIM)
    qk_clip_(w_q, w_kv, torch.tensor([400.0, 100.0]), rotary_rows=rope, value_rows=value)
    q, kv = w_q.view(2, nope + rope, DIM), w_kv.view(2, nope + value, DIM)
    assert q[0, :nope].eq(0.5).all()
    assert q[0, nope:].eq(0.25).all()
    assert kv[0, :nope].eq(0.5).all()
    assert kv[0, nope:].eq(1).all()
    assert q[1].eq(1).all()
    assert kv[1].eq(1).all()


@on_ranks(3)
def test_sharded_rows_are_scaled_by_their_global_number_without_communication():
    mesh = world_mesh()
    (w_q, w_k), logits = tensors([(12, DIM), (6, DIM)], 0), torch.tensor([50.0, 400.0, 120.0, 900.0])
    want_q, want_k = w_q.clone(), w_k.clone()
    qk_clip_(want_q, want_k, logits)
    for layout in ("elements", "rows", "whole", "shard", "replicate"):
        q = torch.nn.Parameter(placed(w_q.clone(), mesh, layout, random.Random(3)))
        k = placed(w_k.clone(), mesh, layout, random.Random(5))
        replicated = torch_distribute(logits, mesh, [Replicate()])
        with record_collectives() as record:
            qk_clip_(q, k, replicated)
        assert record.kinds == []
        assert torch.equal(full(q.detach()), want_q), layout
        assert torch.equal(full(k), want_k), layout
    cut = distribute_tensor(w_q.clone(), mesh, [RaggedShard((0, 1), (1, 0, 59))])
    qk_clip_(cut, None, logits)
    assert torch.equal(full(cut), want_q)


@on_ranks(3)
def test_a_sharded_weight_counts_as_written_on_ranks_without_rows_too():
    cut = distribute_tensor(torch.ones(12, DIM), world_mesh(), [RaggedShard((0, 1), (1, 0, 59))])
    local = cut.to_local()
    before = local._version
    qk_clip_(cut, None, torch.full((4,), 400.0))
    assert local._version > before

"""Parameters that say themselves what is gathered: what FSDP2 cannot do, and what travels. The rest: conformance."""

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extended_tensors import Halved, Wrapper, extend
from runtime_helpers import BrokenTransport
from torch import nn

import block_optim
from fsdp_runtime import MixedPrecisionPolicy, block_policies, fully_shard
from ragged_shard import RaggedDTensor, distribute_like
from ragged_shard.testing import on_ranks, record_collectives, run_ranks


def placed(values, out):
    """What `fsdp_post_all_gather` returns for these values."""
    if out is None:
        return values, (values,)
    with torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(values)
    return None


class Packed(Wrapper):
    """Signs in 8 bits of a byte, and a scale that every rank has: another width and dtype, and metadata."""

    def fsdp_pre_all_gather(self, mesh):
        scale = self.inner.abs().amax().clone()
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        powers = 2 ** torch.arange(8)
        bits = (self.inner >= 0).view(self.inner.shape[0], -1, 8)
        return ((bits * powers).sum(-1).to(torch.uint8),), scale

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        bits = (outputs[0][..., None] >> torch.arange(8)) & 1
        return placed((2.0 * bits.flatten(1) - 1) * metadata, out)


class Scaled(Wrapper):
    """int8 rows with a scale for each row, and the number of each rank."""

    def fsdp_pre_all_gather(self, mesh):
        scale = self.inner.abs().amax(1).clamp_min(1e-12) / 127
        codes = (self.inner / scale[:, None]).round().to(torch.int8)
        return (codes, scale, torch.tensor(mesh.get_local_rank(), dtype=torch.int32)), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        codes, scale, ranks = outputs
        assert ranks.tolist() == list(range(dist.get_world_size()))
        return placed(codes * scale[:, None], out)


def linears(*sizes, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes)])


def signs(weight):
    return torch.where(weight >= 0, 1.0, -1.0) * weight.abs().amax()


def rows_in_codes(weight):
    scale = weight.abs().amax(1).clamp_min(1e-12) / 127
    return (weight / scale[:, None]).round() * scale[:, None]


def train_all(cases):
    for case in cases:
        train(*case)


def train(kind, rounded, sizes, options, steps=3):
    """Train extended weights next to plain ones that are rounded after each step."""
    log: list = []
    model, twin = extend(linears(*sizes), kind, log), linears(*sizes)
    fully_shard(model, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(4, sizes[0], generator=generator)
        found = model(x)
        weights = {name: p.detach().clone() for name, p in twin.named_parameters()}
        with torch.no_grad():
            for p in twin.parameters():
                if p.ndim == 2:
                    p.copy_(rounded(p))
        wanted = twin(x)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        found.square().sum().backward()
        wanted.square().sum().backward()
        with torch.no_grad():
            for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
                dist.all_reduce(q.grad)
                q.grad /= dist.get_world_size()
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)
                q.copy_(weights[name]).sub_(0.01 * p.grad.full_tensor())
                p.sub_(0.01 * p.grad)
                p.grad = q.grad = None
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


def halves(weight):
    return weight.bfloat16().float()


UNEVEN = (8, 13, 2, 8)  # over three ranks: 5, 5, 3 rows; a rank without rows; and 8 of 2 elements, all on one


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [(Scaled, rows_in_codes, UNEVEN, {})]),
        (
            3,
            [
                (Halved, halves, UNEVEN, {"reshard_after_forward": True}),
                (Scaled, rows_in_codes, UNEVEN, {"transport": "collectives"}),
                (Scaled, rows_in_codes, UNEVEN, {"transport": "peer_memory"}),
                (Packed, signs, (8, 16, 8, 8, 16), {"reshard_after_forward": True}),
            ],
        ),
    ],
    ids=["alone", "uneven"],
)
def test_extended_parameters_train_as_plain_ones_that_are_rounded(ranks, cases):
    run_ranks(ranks, train_all, cases)


@on_ranks(2)
def test_what_travels_is_what_pre_returned_in_one_call_with_the_plain_parameters():
    sizes = (64, 64, 32)
    model = extend(linears(*sizes), Packed)
    fully_shard(model)
    model.unshard()
    model.reshard()
    with record_collectives() as record:
        model.unshard()
    kinds = [event.kind for event in record.events]
    assert kinds == ["all_reduce"] * (len(sizes) - 1) + ["all_gather"]  # the scales, then one for the unit
    biases = sum(-(-n // (8 * dist.get_world_size())) * 8 for n in sizes[1:])
    codes = sum(a * b // 8 // dist.get_world_size() for a, b in itertools.pairwise(sizes))
    sent = record.events[-1].bytes_sent
    assert sent == (dist.get_world_size() - 1) * (codes + 4 * biases), (sent, codes, biases)


@on_ranks(2)
def test_what_travels_must_stay_as_it_was():
    log: list = []
    model = extend(linears(8, 8), Halved, log)
    fully_shard(model)
    model(torch.randn(2, 8))
    model.reshard()
    Halved.sent = torch.float32
    try:
        with pytest.raises(
            RuntimeError, match=r"0\.weight .*: fsdp_pre_all_gather of Halved returned .*float32"
        ):
            model(torch.randn(2, 8))
    finally:
        Halved.sent = torch.bfloat16


@on_ranks(2)
def test_state_dicts_load_full_and_sharded_in_place_and_assigned():
    model = extend(linears(8, 13), Halved)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    whole = {key: value.full_tensor() for key, value in state.items()}
    assert torch.equal(whole["0.weight"], linears(8, 13)[0].weight)
    for values in (state, whole):
        for assign in (False, True):
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            model.load_state_dict({key: value.clone() for key, value in values.items()}, assign=assign)
            model(torch.randn(2, 8))
            model.reshard()
            assert type(model[0].weight) is RaggedDTensor
            assert type(model[0].weight.local) is Halved
            assert torch.equal(model[0].weight.full_tensor(), whole["0.weight"])


@on_ranks(2)
def test_writes_through_the_subclass_are_seen_where_parameters_stay_gathered():
    model = extend(linears(8, 8), Halved)
    fully_shard(model, reshard_after_forward=False)
    before = model(torch.ones(1, 8)).detach()
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[0].bias.zero_()
    assert not torch.equal(model(torch.ones(1, 8)), before)


@on_ranks(2)
def test_an_inner_unit_takes_extended_parameters_from_an_outer_one():
    model: Any = nn.Sequential(extend(linears(8, 8), Halved), extend(linears(8, 8), Halved))
    fully_shard(model)
    fully_shard(model[0])
    weight: Any = model[0].get_parameter("0.weight")
    assert type(weight.local) is Halved
    assert torch.equal(weight.full_tensor(), linears(8, 8)[0].weight)
    model(torch.randn(2, 8)).sum().backward()


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Muon"])
@on_ranks(2)
def test_block_optimizers_write_into_the_subclass(name):
    """One optimizer on extended weights and on plain ones, with the same gradients."""
    model, twin = extend(linears(32, 48, 64), Halved), linears(32, 48, 64)
    block_policy = block_policies.rows(16)
    pairs = []
    for one in (model, twin):
        fully_shard(one, block_policy=block_policy)
        matrices = [p for p in one.parameters() if p.ndim == 2]
        pairs.append((matrices, getattr(block_optim, name)(matrices, lr=1e-2)))
    for step in range(2):
        for matrices, optimizer in pairs:
            for p in matrices:
                local: Any = p
                values = torch.linspace(-1, 1 + step, p.numel()).view(p.shape)
                p.grad = distribute_like(values, local.with_local(local.local.to(torch.float32, copy=True)))
            optimizer.step()
    for p, q in zip(pairs[0][0], pairs[1][0], strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())
    assert not torch.equal(pairs[0][0][0].full_tensor(), linears(32, 48, 64)[0].weight)


@on_ranks(2)
def test_what_a_failed_gather_sent_is_kept_for_good():
    broken: Any = BrokenTransport()
    model: Any = fully_shard(extend(linears(8, 6, bias=False), Halved), transport=lambda _: broken)
    with pytest.raises(RuntimeError, match="a peer died"):
        model(torch.ones(2, 8))
    first = broken.sent
    with pytest.raises(RuntimeError, match="a peer died"):
        model(torch.ones(2, 8))
    del model
    gc.collect()
    assert first
    assert all(one() is not None for one in first)

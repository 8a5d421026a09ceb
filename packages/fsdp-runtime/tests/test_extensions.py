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

from fsdp_runtime import fully_shard
from ragged_shard.testing import on_ranks, run_ranks


def placed(values, out):
    """What `fsdp_post_all_gather` returns for these values."""
    if out is None:
        return values, (values,)
    with torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(values)
    return None


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


UNEVEN = (8, 13, 2, 8)  # over three ranks: 5, 5, 3 rows; a rank without rows; and 8 of 2 elements, all on one


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [(Scaled, rows_in_codes, UNEVEN, {})]),
        (
            3,
            [
                (Scaled, rows_in_codes, UNEVEN, {"transport": "collectives"}),
                (Scaled, rows_in_codes, UNEVEN, {"transport": "peer_memory"}),
            ],
        ),
    ],
    ids=["alone", "uneven"],
)
def test_extended_parameters_train_as_plain_ones_that_are_rounded(ranks, cases):
    run_ranks(ranks, train_all, cases)


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

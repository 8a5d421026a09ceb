"""Losses by tokens with other parallelism: tokens of every rank count once, gradients are those of one process."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import cases_ep
import cases_tp
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import RANKS, gradient_distance
from runtime_helpers import full
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

import fsdp_runtime
from fsdp_runtime import fully_shard
from fsdp_runtime.token_loss import TokenLoss, count_tokens
from ragged_shard.testing import on_ranks, rank_mesh

pytestmark = pytest.mark.long
IGNORED, PARTS = -100, 2
Sum = Callable[[nn.Module, Any], torch.Tensor]


def ragged(labels: torch.Tensor, step: int, part: int) -> torch.Tensor:
    """Ignores more of the labels in each row; all of them in the first."""
    rows, length = labels.shape
    kept = (torch.arange(rows) * length + step + part) // (rows - 1)
    return labels.masked_fill(torch.arange(length) >= kept[:, None], IGNORED)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def compare(model, twin, step, own, whole, loss, copies=1) -> None:
    """Backward of this rank's microbatches, and of all in one process: the same loss and gradients.

    Args:
        own, whole: microbatches, with their labels at index 1.
        copies: how many ranks have the same rows.
    """
    losses = [step.loss(loss(model, part)) for part in own]
    for each in losses:
        each.backward()
    total = sum(int(count_tokens(part[1])) for part in whole)
    wanted = torch.stack([loss(twin, part) for part in whole]).sum() / total
    wanted.backward()
    assert step.total == total
    mean = torch.stack([full(one.detach()) for one in losses]).sum()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / copies, wanted.detach(), rtol=1e-6, atol=0)
    assert gradient_distance(model, twin) < 1e-6


def both(build: Callable[[], nn.Module]) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = build().double()
    torch.manual_seed(0)
    return model, build().double()


def labelled(tokens_of: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Microbatches: tokens, and those that follow them."""
    texts = map(tokens_of, range(PARTS))
    return [torch.stack([text[:, :-1], ragged(text[:, 1:], 0, part)]) for part, text in enumerate(texts)]


def next_tokens(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
    tokens, labels = part
    return token_losses(model(tokens), labels)


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        (cases_tp.layers_only, (1, 4)), (cases_tp.sequence, (2, 2)), (cases_tp.sequence, (2, 1, 2)),
        (cases_tp.loss_too, (2, 2)),
    ],
)  # fmt: skip
@on_ranks(4)
def test_ranks_of_tensor_parallelism_count_the_same_tokens_once(shape: tuple[int, ...], cut: Any) -> None:
    """Also where it has cut the losses."""
    mesh, data, rank = cases_tp.meshes(shape)
    model, twin = both(cases_tp.Model)
    cases_tp.shard(fsdp_runtime, model, cut, mesh, data)
    whole = labelled(cases_tp.tokens_of)
    own = [part.chunk(data.size(), 1)[rank] for part in whole]
    with loss_parallel() if cut is cases_tp.loss_too else nullcontext():
        step = TokenLoss(model, mesh=data).step(count_tokens(part[1]) for part in own)
        compare(model, twin, step, own, whole, next_tokens, copies=4 // data.size())


def routed(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
    tokens, labels = part
    return token_losses(model(tokens)[0], labels)


@pytest.mark.parametrize(
    ("ep", "replicas", "expert_replicas"), [(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
)
@on_ranks(RANKS)
def test_experts_need_no_factor_of_their_own(ep: int, replicas: int, expert_replicas: int) -> None:
    model, twin = both(cases_ep.transformer(4))
    cases_ep.wrap_blocks(fsdp_runtime, model, cases_ep.meshes(ep, replicas, expert_replicas), apart=ep == 2)
    whole = labelled(cases_ep.tokens)
    own = [part.chunk(RANKS, 1)[torch.distributed.get_rank()] for part in whole]
    step = TokenLoss(model, mesh=rank_mesh(RANKS)).step(count_tokens(part[1]) for part in own)
    compare(model, twin, step, own, whole, routed)


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = cases_tp.Model(), nn.Linear(4, 4)


@on_ranks(RANKS)
def test_tokens_of_experts_on_tensor_parallel_ranks_count_once_or_raise() -> None:
    mesh, data, _ = cases_tp.meshes((2, 2))
    model: Any = WithExperts()
    cases_tp.shard(fsdp_runtime, model.dense, cases_tp.sequence, mesh, data)
    fully_shard(model.experts, mesh=mesh)
    with pytest.raises(ValueError, match="pass as mesh= the mesh of all ranks that have different tokens"):
        TokenLoss(model)
    assert TokenLoss(model, mesh=data).step([1]).total == 2

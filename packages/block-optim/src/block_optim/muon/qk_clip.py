"""QK-clip: keep attention logits from growing by shrinking the rows of W_q and W_k of the heads where they did.

For a head with the largest logit s over the batch, eta = min(1, tau / s): its rows of W_q are multiplied by
eta^alpha and those of W_k by eta^(1 - alpha), so that its logits come down to tau. From Kimi K2's MuonClip.

    grouped keys       a key head serves several query heads: its factor is the smallest of theirs
    MLA                the rows without rotary position: W_q by eta^alpha, W_k by eta^(1 - alpha);
                       the rotary rows of W_q by eta, and the rotary key, which all heads share, not at all
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial

from block_optim.core._torch_compat import SHARDS, local_of
from block_optim.core.params import Param


@torch.no_grad()
def qk_clip_(
    w_q: torch.Tensor | None,
    w_k: torch.Tensor | None,
    max_logits: torch.Tensor,
    *,
    tau: float = 100.0,
    alpha: float = 0.5,
    rotary_rows: int = 0,
    value_rows: int = 0,
) -> torch.Tensor:
    """Scale the heads' rows of a query and a key weight in place; returns eta, one number a query head.

    Communicates nothing: each rank scales its own rows, by their numbers in the global tensor. Heads are consecutive
    groups of equally many rows. A weight that is None is left out (eta still comes back).

    Args:
        w_q: (query heads x rows of a head, ...): plain, DTensor or RaggedDTensor.
        w_k: (key heads x rows of a head, ...); the query heads are a multiple of its heads.
        max_logits: the largest pre-softmax logit of each query head, 1-D. The same on all ranks: reduce it with MAX
            over those that saw other data before.
        tau: the largest logit allowed.
        alpha: the query's share of the scaling.
        rotary_rows: MLA: number of last rows of each head of ``w_q`` that are rotary and take eta itself. ``w_k`` is
            then the projection up to the heads' keys and values, without the shared rotary key.
        value_rows: MLA: number of last rows of each head of ``w_k`` that are values, and stay.

    Raises:
        ValueError: heads that do not divide rows, options outside their range, logits that are not finite or not 1-D;
            a DTensor of logits whose reduction is pending.
    """
    placements = getattr(max_logits, "placements", ())
    if any(isinstance(p, (Partial, *SHARDS)) for p in placements):
        raise ValueError(
            f"max_logits has placements {placements}: reduce it with MAX first, all ranks need the same"
        )
    logits = local_of(max_logits).detach().float()
    if logits.ndim != 1 or not logits.numel() or not bool(torch.isfinite(logits).all()):
        raise ValueError(
            f"max_logits of shape {tuple(logits.shape)}: expected one finite number for each query head"
        )
    if not tau > 0 or not 0 <= alpha <= 1:
        raise ValueError(f"tau={tau}, alpha={alpha}: expected tau > 0 and alpha from 0 to 1")
    eta = (tau / logits.clamp(min=tau)).clamp(max=1.0)
    if w_q is not None:
        param, rows = _heads(w_q, "w_q", logits.numel(), rotary_rows)
        _scale_rows(param, rows, [(eta**alpha, rows - rotary_rows), (eta, rotary_rows)])
    if w_k is not None:
        heads = _key_heads(
            w_k, logits.numel(), rows=None if w_q is None else rows - rotary_rows, values=value_rows
        )
        param, rows = _heads(w_k, "w_k", heads, value_rows)
        smallest = eta.view(heads, -1).amin(1)
        _scale_rows(param, rows, [(smallest ** (1 - alpha), rows - value_rows), (None, value_rows)])
    return eta


def _key_heads(w_k: torch.Tensor, query_heads: int, rows: int | None, values: int) -> int:
    """Key heads have as many rows as query heads have without their rotary ones (and their values in addition)."""
    if rows is None:
        return query_heads
    per_head = rows + values
    heads = w_k.shape[0] // per_head if per_head else 0
    if not heads or w_k.shape[0] % per_head or query_heads % heads:
        raise ValueError(
            f"w_k of shape {tuple(w_k.shape)}: its rows are not a number of heads of {per_head} rows that divides "
            f"{query_heads} query heads"
        )
    return heads


def _heads(weight: torch.Tensor, name: str, heads: int, special: int) -> tuple[Param, int]:
    param = Param(weight, name)
    rows = weight.shape[0] // heads if weight.ndim else 0
    if weight.ndim < 2 or weight.shape[0] % heads or not 0 <= special <= rows:
        raise ValueError(
            f"{name} of shape {tuple(weight.shape)}: its rows do not divide into {heads} heads "
            f"of more than {special} rows"
        )
    param.check_row_major()
    return param, rows


def _scale_rows(param: Param, rows: int, factors: Sequence[tuple[torch.Tensor | None, int]]) -> None:
    """Multiply this rank's rows of each head: ``factors`` are (factor, number of consecutive rows)."""
    local = param.local.view(-1)
    torch.autograd.graph.increment_version(local)  # on every rank, with or without rows: units compare it
    inner = param.numel // param.shape[0]
    heads = param.shape[0] // rows
    by_row = torch.cat(
        [
            torch.ones(heads, count, dtype=torch.float32, device=local.device)
            if factor is None
            else factor.to(local.device)[:, None].expand(heads, count)
            for factor, count in factors
        ],
        1,
    ).reshape(-1)
    for piece in param.holding.own:
        part = piece.here(local)
        if piece.rows > 1:  # of columns that tensor parallelism has cut
            starts = piece.first + piece.stride * torch.arange(piece.rows, device=local.device)
            columns = torch.arange(piece.width, device=local.device)
            part.mul_(by_row[(starts[:, None] + columns) // inner])
            continue
        own_factors = by_row[piece.first // inner : -(-piece.stop // inner)]
        head = piece.first % inner  # elements of the first row that are another rank's
        if head == 0 and piece.width % inner == 0:
            part.view(-1, inner).mul_(own_factors[:, None])
        else:
            part.mul_(own_factors.repeat_interleave(inner)[head : head + piece.width])

"""QK-clip of Kimi K2's MuonClip: after a step, shrink the rows of W_q and W_k of heads whose attention logits grew.

For a head with the largest logit s, eta = min(1, tau / s): its rows of both weights are multiplied by the root of eta.
A key head that serves several query heads takes the smallest of their factors. Communicates nothing.
"""

import torch
from torch import Tensor

from ragged_shard import distribute_like


@torch.no_grad()
def qk_clip_(w_q: Tensor, w_k: Tensor, max_logits: Tensor, key_heads: int, tau: float = 100.0) -> None:
    """Scale in place; ``max_logits`` has one number a query head, the same on all ranks (all_reduce it with MAX)."""
    factors = (tau / max_logits).clamp(max=1.0).sqrt()
    for weight, factor in ((w_q, factors), (w_k, factors.view(key_heads, -1).amin(1))):
        rows = factor.repeat_interleave(weight.shape[0] // len(factor))[:, None].expand(weight.shape)
        weight.mul_(distribute_like(rows.to(weight.dtype), weight, src_data_rank=None))


if __name__ == "__main__":
    heads, key_heads, rows, dim = 4, 2, 3, 5
    w_q, w_k = torch.ones(heads * rows, dim), torch.ones(key_heads * rows, dim)
    qk_clip_(w_q, w_k, torch.tensor([50.0, 400.0, 100.0, 100.0]), key_heads)
    print(w_q[::rows, 0].tolist(), w_k[::rows, 0].tolist())

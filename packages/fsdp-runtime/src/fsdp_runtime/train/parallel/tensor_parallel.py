# ruff: noqa: N803, N806  (capitals are dimensions)
"""Tensor, sequence and context parallelism of the built-in model.

    tp    matrices by rows or columns; embedding, norms, residuals and experts by positions (sequence parallel)
              x (T/tp) -> norm -> gather -> wq wk wv | heads/tp | wo -> reduce-scatter -> x (T/tp)
              logits stay cut by token: torch's loss_parallel sums what the softmax needs
    cp    positions everywhere; keys and values are gathered for each attention, their gradients reduce-scattered
              K, V (T/cp) -> all-gather -> mask of T/cp x T

The exchanges are those of DTensor, so that autograd knows them.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..model import Attention, CausalAttention, MixtureOfExperts, Transformer
from .experts import apply_expert_parallel
from .meshes import Meshes

_WHOLE, _POSITIONS = Replicate(), Shard(1)  # of activations (B, T, ...)


def parallelize(model: Transformer, meshes: Meshes, seq_len: int) -> set[nn.Parameter]:
    """Divide the model over tp, cp and ep, in place, before it is sharded.

    Returns:
        the experts' parameters if they are on another mesh than the others.
    """
    splits = meshes.splits
    assert meshes.dense is not None
    assert meshes.batches is not None
    each, cp_rank = seq_len // splits.cp, meshes.rank_of("cp")
    if splits.slices > 1:
        model.positions = range(cp_rank * each, (cp_rank + 1) * each)
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                assert meshes.slices is not None
                module.sum_counts = partial(_sum_over, group=meshes.slices.get_group("slices"))
    if splits.cp > 1:
        for module in model.modules():
            if isinstance(module, Attention):
                module.inner = ContextParallelAttention(meshes.batches["cp"])
    if splits.tp > 1:
        tp = meshes.dense["tp"]
        for block in model.blocks:
            parallelize_module(block, tp, _block_plan(block))
        ends = {
            "embed": RowwiseParallel(input_layouts=_WHOLE, output_layouts=_POSITIONS),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=_POSITIONS, output_layouts=Shard(-1), use_local_output=False
            ),
        }
        parallelize_module(model, tp, ends)
        model.tie_weights()
    if splits.one_mesh or not model.config.num_experts:
        return set()
    assert meshes.experts is not None
    return apply_expert_parallel(model, meshes.experts["ep"])


def _block_plan(block: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(_POSITIONS, None, None), desired_input_layouts=(_WHOLE, None, None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=_POSITIONS),
    }
    if isinstance(block.ff, MixtureOfExperts):  # each rank's experts see its own positions
        return {
            **plan,
            "ff_norm": SequenceParallel(use_local_output=True),
            "ff.router": SequenceParallel(sequence_dim=0, use_local_output=True),
        }
    return {
        **plan,
        "ff_norm": SequenceParallel(),
        "ff": PrepareModuleInput(input_layouts=_POSITIONS, desired_input_layouts=_WHOLE),
        "ff.w_gate": ColwiseParallel(),
        "ff.w_up": ColwiseParallel(),
        "ff.w_down": RowwiseParallel(output_layouts=_POSITIONS),
    }


class ContextParallelAttention(CausalAttention):
    """Causal attention of this rank's positions to those of all ranks of `mesh`, in order.

    Communicates: an all-gather of keys and of values in forward, a reduce-scatter of their gradients in backward.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor) -> Tensor:
        """(B, H, T, C) of this rank's T positions in and out."""
        T = q_BHTC.shape[2]
        k_BKUC, v_BKUC = (_gathered(x, self.mesh) for x in (k_BKTC, v_BKTC))
        first = self.mesh.get_local_rank() * T
        position_T = torch.arange(first, first + T, device=q_BHTC.device)
        seen_TU = torch.arange(k_BKUC.shape[2], device=q_BHTC.device) <= position_T[:, None]
        gqa = k_BKTC.shape[1] != q_BHTC.shape[1]
        return F.scaled_dot_product_attention(q_BHTC, k_BKUC, v_BKUC, attn_mask=seen_TU, enable_gqa=gqa)


def _gathered(x_BKTC: Tensor, mesh: DeviceMesh) -> Tensor:
    whole = DTensor.from_local(x_BKTC, mesh, [Shard(2)], run_check=False).redistribute(placements=[_WHOLE])
    return whole.to_local(grad_placements=[Partial()])


def _sum_over(counts_BE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Counts (B, E), added up over the ranks that have slices of the same sequences: an all-reduce, no gradients."""
    total_BE = counts_BE.detach().clone()
    dist.all_reduce(total_BE, group=group)
    return total_BE

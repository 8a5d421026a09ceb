"""Tensor and sequence parallelism of `fsdp-train`'s model, by torch's DTensor.

matrices by rows or columns; embedding, norms, residuals and experts by positions (sequence parallel)
    x (T/tp) -> norm -> gather -> wq wk wv | heads/tp | wo -> reduce-scatter -> x (T/tp)
logits stay cut by token: torch's loss_parallel sums what the softmax needs
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_runtime.train.model import MixtureOfExperts, Transformer

_WHOLE, _POSITIONS = Replicate(), Shard(1)  # of activations (B, T, ...)


def apply_tensor_parallel(model: Transformer, tp: DeviceMesh) -> None:
    """Divide a model whose embedding and head are not tied over a 1-D mesh, in place, before it is sharded."""
    for block in model.blocks:
        parallelize_module(block, tp, _block_plan(block))
    logits = ColwiseParallel(input_layouts=_POSITIONS, output_layouts=Shard(-1), use_local_output=False)
    ends = {
        "embed": RowwiseParallel(input_layouts=_WHOLE, output_layouts=_POSITIONS),
        "norm": SequenceParallel(),
        "head": logits,
    }
    parallelize_module(model, tp, ends)


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

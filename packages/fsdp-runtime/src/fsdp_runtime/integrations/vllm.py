"""vLLM: the trainer's side of its weight transfer, for models with units of fsdp_runtime.

    source = weight_source(model, dtype=torch.bfloat16)           once, on every rank
    engine = WeightTransferTrainerFactory.trainer_init(NCCLTrainerInitInfo(...), client=client, source=source)
    engine.send_weights()                                         after each step, on every rank

Written for vLLM 0.33.0, whose `weight_transfer/base.py` it was tried with. Not tried: its NCCL, IPC and RDT engines.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .. import _torch_compat as compat
from ..checkpoint.conversions import FileGroups
from ..checkpoint.export import Exporter, entries_of, file_groups
from ..checkpoint.local_shards import LocalShard, local_shards
from ..checkpoint.merged import Merged


def weight_source(
    model: nn.Module | Merged, *, dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 30
) -> Any:
    """A vLLM `WeightSource` of a model: its parameters and persistent buffers, whole, as its files have them.

    Names and forms are the state dict's; of a transformers model, as `save_pretrained` writes them. `metadata`
    communicates nothing. Every rank calls `iter_full` (which is `iter_full_params`) and iterates to the end. There is
    no `iter_local`: vLLM describes shards by `Shard` alone; `local_shards` is for the engines of `vllm_shards`.

    A pass reads the model again, as it is at the call of `iter_full`; if shards changed in between, by an optimizer's
    step or a merged LoRA, it raises on their ranks. It does not see changes by a replayed CUDA graph.

    Args:
        model: sharded or not; without a forward or backward under way during a pass. Or `merged_params` of it.
        dtype: of floating-point tensors. Defaults to theirs.
        bucket_bytes: of gathered memory; see `iter_full_params`.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: (in a pass) tensors changed, or the model has other tensors than `metadata`.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    base: Any = WeightSource

    class ShardedModelSource(base):
        """Weights of a model of fsdp_runtime."""

        @cached_property
        def metadata(self) -> list[Any]:
            """Name, dtype and shape of each tensor, in the order of `iter_full`; every rank has all of them."""
            groups = file_groups(model, entries_of(model, buffers=True), dtype)
            return [ParamMeta(*meta) for meta in _described(groups)]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            """A pass over the whole tensors."""
            exporter = Exporter("iter_full", model, dtype, bucket_bytes, None, buffers=True)
            groups = file_groups(model, exporter.entries, dtype)
            if [(meta.name, meta.dtype, meta.shape) for meta in self.metadata] != _described(groups):
                raise RuntimeError("iter_full: tensors differ from metadata; make a new weight_source")
            return _pass(exporter, groups)

        def local_shards(self) -> Iterator[LocalShard]:
            """This rank's boxes, under the names of the state dict."""
            if isinstance(model, Merged):
                raise NotImplementedError(
                    "local_shards: merged_params are whole tensors; use iter_full, or merge inside of full_params"
                )
            return local_shards(model, dtype=dtype)

    return ShardedModelSource()


def _described(groups: FileGroups) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, t.dtype, tuple(t.shape)) for group in groups.made for name, t in group.items()]


def _pass(exporter: Exporter, groups: FileGroups) -> Iterator[tuple[str, torch.Tensor]]:
    """The exporter's tensors in the form of files, as long as they have the values that they have now."""
    shards = {entry.name: exporter.sources(entry) for entry in exporter.entries}
    before = {name: compat.versions(tensors) for name, tensors in shards.items()}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, full in exporter.tensors():
            if compat.versions(shards[name]) != before[name]:
                raise RuntimeError(
                    f"iter_full: {name} was written to since iter_full was called; read all tensors of a pass before "
                    "an optimizer's step, and while a LoRA is merged"
                )
            yield name, full
            del full  # before the next is gathered

    return groups.in_file_form(tensors())

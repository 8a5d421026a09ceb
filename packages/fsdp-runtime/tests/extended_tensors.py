"""Tensor subclasses with FSDP2's all-gather extensions, for tests; ranks import them too."""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

aten = torch.ops.aten
_KEPT = {
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.clone.default,
}


class Wrapper(torch.Tensor):
    """One plain tensor inside, which ops see."""

    inner: Any
    log: Any

    def __new__(cls, inner, **options):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner, log=None):
        self.inner = inner
        self.log = [] if log is None else log

    def __tensor_flatten__(self):
        return ["inner"], self.log

    @classmethod
    def __tensor_unflatten__(cls, tensors, log, size, stride):
        return cls(tensors["inner"], log=log)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        log = next(a.log for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, cls))
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: cls(t, log=log), out) if func in _KEPT else out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.inner})"


class Halved(Wrapper):
    """Travels in bf16; computes in the parameter's dtype."""

    sent = torch.bfloat16

    def fsdp_pre_all_gather(self, mesh):
        self.log.append(("pre", mesh))
        return (self.inner.to(self.sent),), "metadata"

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        self.log.append(("post", metadata, param_dtype, out is None))
        (found,) = outputs
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(found)
            return None
        made = found.to(param_dtype, copy=True)
        return made, (found, made)


def extend(model, kind, log=None):
    """Weights become tensors of this kind, of a stack those of the blocks; biases stay plain."""
    for module in getattr(model, "blocks", model).modules():
        if isinstance(module, nn.Linear):
            options = {} if log is None else {"log": log}
            module.weight = nn.Parameter(kind(module.weight.detach(), **options))
    return model

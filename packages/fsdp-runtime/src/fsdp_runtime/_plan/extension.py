"""Parameters that are tensor subclasses with FSDP2's all-gather extensions: what is inside, and the way back.

subclass --unwrap--> plain tensor in the flat buffer --wrap--> subclass around this rank's slice
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._errors import WrongCallError

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


@dataclass(frozen=True, eq=False)
class Extension:
    """A tensor subclass around one plain tensor of its own shape and dtype.

    Attributes:
        kind: the class.
        inner: the attribute that holds the plain tensor.
        context: what `__tensor_flatten__` says of the rest.
        takes_all: whether `fsdp_pre_all_gather` takes five arguments, not the mesh alone.
        attributes: the Python attributes that every instance has of the class itself.
    """

    kind: type[torch.Tensor]
    inner: str
    context: Any
    takes_all: bool
    attributes: frozenset[str]

    def wrap(self, plain: torch.Tensor) -> torch.Tensor:
        """The subclass around another plain tensor, whose memory it shares."""
        unflatten: Any = self.kind
        wrapped: torch.Tensor = unflatten.__tensor_unflatten__(
            {self.inner: plain}, self.context, plain.shape, plain.stride()
        )
        return wrapped

    def wrap_like(self, plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The same with what Python attributes another one has, such as a scale computed ahead."""
        wrapped = self.wrap(plain)
        wrapped.__dict__.update({name: value for name, value in like.__dict__.items() if name != self.inner})
        return wrapped

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain tensor inside; a plain tensor itself."""
        if not isinstance(tensor, self.kind):
            return tensor
        plain: torch.Tensor = getattr(tensor, self.inner)
        return plain


def extension_of(name: str, tensor: torch.Tensor) -> Extension:
    """How to take a tensor subclass apart.

    Raises:
        WrongCallError: one of the two methods is missing, or the first takes other arguments than FSDP2 passes.
        NotImplementedError: it has neither, or is not one plain tensor of its own shape and dtype.
    """
    what = f"parameter {name} is a {type(tensor).__name__}"
    has = [hasattr(tensor, PRE), hasattr(tensor, POST)]
    if has[0] != has[1]:
        raise WrongCallError(f"{what} with {PRE if has[0] else POST} alone; define both or neither")
    flatten: Any = tensor
    names, context = flatten.__tensor_flatten__()
    advice = "shard the plain parameter, or pass it in ignored_params"
    if len(names) != 1:
        raise NotImplementedError(
            f"{what} of {len(names)} tensors ({', '.join(names)}): the flat buffer holds one tensor of the parameter's "
            f"shape and dtype, not one that is quantized at rest; {advice}, or keep weights quantized by "
            "fully_shard(quantization_policy=...)"
        )
    if not has[0]:
        raise NotImplementedError(
            f"{what} without {PRE} and {POST}, which say how a tensor subclass is gathered; {advice}"
        )
    plain = getattr(tensor, names[0])
    if type(plain.data) is not torch.Tensor or plain.shape != tensor.shape or plain.dtype != tensor.dtype:
        raise NotImplementedError(
            f"{what} of shape {tuple(tensor.shape)} and {tensor.dtype} around {names[0]}, a {type(plain).__name__} of "
            f"shape {tuple(plain.shape)} and {plain.dtype}; the flat buffer holds a plain tensor of the parameter's "
            f"shape and dtype: {advice}"
        )
    count = len(inspect.signature(getattr(tensor, PRE)).parameters)
    if count not in (1, 5):
        raise WrongCallError(
            f"{what} whose {PRE} takes {count} arguments; expected (mesh) or "
            "(mesh, outer_size, outer_stride, module, mp_policy)"
        )
    unflatten = inspect.signature(flatten.__tensor_unflatten__)
    try:
        unflatten.bind({}, context, plain.shape, plain.stride())
    except TypeError:
        raise WrongCallError(
            f"{what} whose __tensor_unflatten__ takes {unflatten}; torch passes it four: (inner_tensors, metadata, "
            f"outer_size, outer_stride). Correct it, or {advice}"
        ) from None
    extension = Extension(type(tensor), names[0], context, count == 5, frozenset())
    rebuilt = extension.wrap(plain.detach())
    if type(rebuilt) is not type(tensor):
        raise NotImplementedError(
            f"{what} whose __tensor_unflatten__ makes a {type(rebuilt).__name__}; it must make the same class around "
            f"this rank's slice: correct it, or {advice}"
        )
    return replace(extension, attributes=frozenset(rebuilt.__dict__))


def refuse_patched(name: str, local: torch.Tensor) -> None:
    """Raise NotImplementedError where somebody has set FSDP2's methods on a plain local tensor."""
    if PRE in local.__dict__ or POST in local.__dict__:
        raise NotImplementedError(
            f"parameter {name}: its local tensor was given {PRE} or {POST} after fully_shard, which would not be "
            "called; give fully_shard a tensor subclass that has both"
        )

"""Groups of parameters that are tensor subclasses with FSDP2's all-gather extensions.

subclass --unwrap--> plain tensor in the flat buffer --wrap--> subclass around this rank's slice
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from dbuffer import WireForm
from layout_planner import Elements, Layout, TensorSpec
from ragged_shard import RaggedDTensor

from .. import _torch_compat as compat
from .._plan.group import Dtypes, ParamPlan, Request, spec_of
from .._plan.mesh import WrongCallError
from .._plan.param import PLAIN, POST, PRE, ManagedParam, Wrapper, local_of
from .group import Group


@dataclass(frozen=True, eq=False)
class Extension(Wrapper):
    """A tensor subclass around one plain tensor of the same shape and dtype."""

    kind: type[torch.Tensor]  # the class
    inner: str  # the attribute that holds the plain tensor
    context: Any  # what `__tensor_flatten__` says of the rest
    takes_all: bool  # whether `fsdp_pre_all_gather` takes five arguments, not the mesh alone
    # the Python attributes that every instance has of the class itself
    attributes: frozenset[str] = frozenset()
    # An instance without elements, of which ops make others as in FSDP2, if `__tensor_unflatten__` does not make one.
    empty: torch.Tensor | None = None

    def wrap(self, plain: torch.Tensor) -> torch.Tensor:
        """The subclass around another plain tensor, whose memory it shares."""
        wrapped: torch.Tensor
        if self.empty is not None:
            wrapped = self.empty.new_zeros(plain.shape, device=plain.device)
            setattr(wrapped, self.inner, plain)
            return wrapped
        unflatten: Any = self.kind
        wrapped = unflatten.__tensor_unflatten__(
            {self.inner: plain}, self.context, plain.shape, plain.stride()
        )
        return wrapped

    def wrap_like(self, plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Like `wrap`, also copying the Python attributes of `like`, such as a precomputed scale."""
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

    Raises WrongCallError if one of the two methods is missing, or the first takes other arguments than FSDP2 passes;
    NotImplementedError if it has neither, is not around one plain tensor of the same shape and dtype, or cannot be made
    around another one.
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
    extension = Extension(type(tensor), names[0], context, count == 5)
    signature = inspect.signature(flatten.__tensor_unflatten__)
    try:
        signature.bind({}, context, plain.shape, plain.stride())
        usable = type(extension.wrap(plain.detach())) is type(tensor)
    except TypeError:
        usable = False
    if not usable:
        extension = replace(extension, empty=tensor.new_zeros((0, *tensor.shape[1:])))
    rebuilt = extension.wrap(plain.detach())
    if type(rebuilt) is not type(tensor) or getattr(rebuilt, names[0]).data_ptr() != plain.data_ptr():
        raise NotImplementedError(
            f"{what} that cannot be made around this rank's slice: neither by __tensor_unflatten__{signature}, which "
            "torch calls with (inner_tensors, metadata, outer_size, outer_stride), nor by new_zeros. Let one of them "
            f"make a {type(tensor).__name__}, or {advice}"
        )
    return replace(extension, attributes=frozenset(rebuilt.__dict__))


def unwrapped(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Wrapper]:
    """The plain values of a parameter, and how a local tensor is made of a slice of them. See `extension_of`."""
    if not compat.is_wrapper_subclass(tensor):
        return tensor, PLAIN
    extension = extension_of(name, tensor.data)
    return extension.unwrap(tensor.data), extension


class SubclassGroup(Group):
    """Parameters are tensor subclasses that define their own all-gather; see `SubclassGather`."""

    holds_values: ClassVar[bool] = False
    refused_whole: ClassVar[str] = "a tensor subclass"

    @classmethod
    def check(cls, param: ManagedParam[Any], request: Request) -> None:
        """Raise ValueError, naming the parameter, if its weights are to be quantized."""
        assert isinstance(param.wrapper, Extension)
        kind, policy = param.wrapper.kind.__name__, request.quantization
        if policy is not None and policy.blocks is not None and param.selected:
            raise ValueError(
                f"quantization_policy: parameter {param.name} was selected, but is a {kind}, "
                "which defines its own all-gather; do not select it (QuantizationPolicy.select)"
            )

    @classmethod
    def lay_out(
        cls, params: Sequence[ManagedParam[Any]], request: Request, dtypes: Dtypes
    ) -> tuple[Layout, WireForm | None]:
        """Each parameter in a separate segment, cut between slices of its first dimension.

        All ranks but the last ones get equally many, as extensions expect: gathered rows are contiguous. Raises
        ValueError if the planner lays a tensor out differently.
        """
        align, ranks = dtypes.alignment, params[0].data.shard_size
        specs, segments = [], []
        for param in params:
            allowed = spec_of(param, request.blocks)
            width = math.prod(param.shape[1:])
            # Blocks that start over in each stacked matrix allow any cut between matrices.
            block = math.lcm(width, allowed.grid.block) if allowed.grid.uniform else width
            spec = TensorSpec(param.name, param.shape, Elements(min(block, allowed.numel)))
            layout = request.planner([spec], ranks, align=align)
            if len(layout.segments) != 1 or layout.segments[0].offsets != (0,):
                raise ValueError(
                    f"planner laid {param.name} out in {layout.segments}; expected one segment that starts with it, "
                    "since it is a tensor subclass with all-gather extensions"
                )
            specs.append(spec)
            segments.append(layout.segments[0])
        return Layout(tuple(specs), ranks, align, tuple(segments)), None

    def _slice_of(self, param: ManagedParam[Any], plan: ParamPlan, value: torch.Tensor) -> torch.Tensor:
        return super()._slice_of(param, plan, param.plain(value))

    def as_sharded(self, param: ManagedParam[Any], value: torch.Tensor) -> RaggedDTensor:
        """A value of the global shape, laid out like the sharded parameter and wrapped in its subclass."""
        sharded = super().as_sharded(param, param.plain(value.detach()))
        return sharded.with_local(param.wrapper.wrap(sharded.local))

    def _allocate(self) -> None:
        from .subclass_gather import SubclassGather  # few models have such parameters

        data, compute, layer = self.plan.data, self.plan.dtypes.compute, self._streams.layer
        self._wire = SubclassGather(
            self.name, self.params, data, self.plan.precision, compute, layer, self._make_hook
        )
        super()._allocate()  # without views: the gather makes the unsharded parameters

    def _versions(self) -> list[int]:
        """Writes through a tensor subclass count in the subclass."""
        assert self.buffer is not None
        return compat.versions([*self.buffer.shard, *(local_of(param.sharded) for param in self.params)])

"""Groups whose sharded parameters are codes: quantization, and the entries of state dicts.

    sharded parameter  w         RaggedDTensor with the shape and dtype of the values, around a BlockQuantizedTensor
    state dict         w.codes   RaggedDTensor, a row of bytes for each row of w
                       w.scales  RaggedDTensor, a row of fp32 for each band of tiles
                       w.format  int64, which format they are in (`BlockFormat.record`)

Codes and scales alias the shard, lie over the ranks as the parameter does, and load at any number of ranks.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch

import ragged_shard
from dbuffer.encodings import BlockInt8, BlockQuantizedTensor, BlocksAtRest, empty_codes
from ragged_shard import RaggedDTensor, RaggedShard
from ragged_shard.device import CPU
from ragged_shard.dist import DISTRIBUTED

from .._params.group import Group
from .._plan.group import GroupMemory, GroupPlan, ParamPlan, Request, wrap_local
from .._plan.param import ManagedParam
from .._torch.tree import local_like
from .on_wire import OnWireGroup

CODES, SCALES, FORMAT = ".codes", ".scales", ".format"
VALUES = (torch.float32, torch.bfloat16, torch.float16)


class Entries(NamedTuple):
    """Entries of one parameter in a state dict."""

    codes: torch.Tensor  # (*shape[:-1], bytes of a row); int8 where codes are integers, else uint8
    scales: torch.Tensor  # fp32, (bands, tiles of a band)
    format: torch.Tensor  # int64, one number in CPU memory


def entries_of(sharded: torch.Tensor) -> Entries:
    """Codes and scales of a sharded parameter, which share its memory, and their format. Communicates nothing."""
    assert isinstance(sharded, RaggedDTensor)
    local = sharded.local
    assert isinstance(local, BlockQuantizedTensor)
    mesh, grid, fmt = sharded.device_mesh, local.run.grid, local.format
    axis, cut = next((axis, p) for axis, p in enumerate(sharded.placements) if isinstance(p, RaggedShard))
    bands = []
    for rank in range(mesh.size(axis)):
        start, stop = [edge * grid.rows // sum(cut.local_units) for edge in cut.unit_range(rank)]
        first, last = grid.scales_of(start, stop)
        bands.append((last - first) // grid.across)
    shape = (*sharded.shape[:-1], fmt.code_bytes(grid.columns))
    codes = local.codes.view(-1, *shape[len(cut.dims) :])
    if isinstance(fmt, BlockInt8):
        codes = codes.view(torch.int8)
    by_bands = list(sharded.placements)
    by_bands[axis] = RaggedShard((0,), tuple(bands))
    scales = local.scales.view(-1, grid.across)
    return Entries(
        RaggedDTensor.from_local(codes, mesh, sharded.placements, shape=shape),
        RaggedDTensor.from_local(scales, mesh, by_bands, shape=(grid.num_bands, grid.across)),
        torch.tensor(fmt.record, device=CPU),
    )


def _format(plan: GroupPlan) -> Any:
    assert isinstance(plan.wire, BlocksAtRest)
    return plan.wire.format


def from_entries(plan: GroupPlan, param: ParamPlan, like: torch.Tensor, entries: Entries) -> RaggedDTensor:
    """A sharded parameter, laid out like another, of codes and scales that are distributed in any way, or whole.

    Communicates if they are distributed in another layout (see `ragged_shard.redistribute`). Raises ValueError, naming
    the parameter, if they have another format, or another shape or dtype than the format's.
    """
    assert isinstance(like, RaggedDTensor)
    fmt, record = _format(plan), int(entries.format)
    if record != fmt.record:
        raise ValueError(
            f"{param.name}{CODES}: saved in {fmt.describe(record)}, but kept in {fmt}; shard with the format that they "
            f"were saved in (QuantizationPolicy.at_rest), or load values under {param.name!r}"
        )
    moved: list[torch.Tensor] = []
    for what, value, wanted in zip((CODES, SCALES), entries[:2], entries_of(like)[:2], strict=True):
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise ValueError(
                f"{param.name}{what}: {value.dtype} of shape {tuple(value.shape)}; {fmt} has {wanted.dtype} "
                f"of shape {tuple(wanted.shape)}. Load it into a weight of the shape that it was saved in"
            )
        moved.append(local_like(wanted, value.detach()).to(plan.data.device))
    local = like.local
    assert isinstance(local, BlockQuantizedTensor)
    codes, scales = moved[0].view(torch.uint8).view(-1), moved[1].view(-1)
    return wrap_local(param, local.around(codes, scales))


class AtRestGroup(OnWireGroup):
    """Parameters are kept as codes, which are gathered as they are. They are not trained."""

    form = BlocksAtRest
    holds_values: ClassVar[bool] = False
    trained: ClassVar[bool] = False

    @classmethod
    def check(cls, param: ManagedParam[Any], request: Request) -> None:
        """Raise ValueError, naming the parameter, if it cannot be kept as codes."""
        super().check(param, request)
        selected = f"quantization_policy: parameter {param.name} was selected to be kept as codes, and "
        if param.requires_grad:
            raise ValueError(
                f"{selected}is trained; freeze it (requires_grad_(False)) before fully_shard, or do not select it "
                "(QuantizationPolicy.select)"
            )
        if param.other is not None:
            raise ValueError(
                f"{selected}another parallelism has cut it; do not select it (QuantizationPolicy.select)"
            )

    def _slice_of(self, param: ManagedParam[Any], plan: ParamPlan, value: Any) -> torch.Tensor:
        """This rank's slice of values or codes, whole on each rank or distributed, as codes in new memory or on meta.

        Communicates if they are distributed in another layout (see `ragged_shard.redistribute`).
        """
        value, empty = value.detach(), partial(empty_codes, self.plan.geometry, plan.name, _format(self.plan))
        coded = isinstance(getattr(value, "local", None), BlockQuantizedTensor)
        if coded and value.local.format != _format(self.plan):
            value = value.with_local(value.local.dequantize())
        elif coded and value.placements != plan.placements:
            like = empty(value.dtype, torch.device("meta"))
            value = from_entries(self.plan, plan, wrap_local(plan, like), entries_of(value))
        with torch.no_grad():
            if isinstance(value, DISTRIBUTED):
                value = ragged_shard.redistribute(value, placements=plan.placements).to_local()
            else:
                value = self.plan.geometry.cut(plan.name, value)
            device = value.device if value.is_meta else self.plan.data.device
            codes = empty(value.dtype if value.dtype in VALUES else self.plan.dtypes.kept, device)
            codes.copy_(value)
        return codes

    def as_sharded(self, param: ManagedParam[Any], value: torch.Tensor) -> RaggedDTensor:
        """Codes of a value of the global shape, laid out like the sharded parameter."""
        plan = self.plan_of(param)
        return wrap_local(plan, self._slice_of(param, plan, value))

    def check_trainable(self, param: ManagedParam[Group]) -> None:
        """Raise ValueError, naming the parameter."""
        raise ValueError(
            f"{self.name}: parameter {param.name} requires a gradient since, but is kept as codes "
            f"({_format(self.plan)}), which are not trained; call requires_grad_(False), or shard it without at_rest"
        )

    def split_entry(self, param: ManagedParam[Any], state_dict: dict[str, Any], key: str) -> None:
        """Replace the parameter's entry of a state dict by its codes and scales."""
        del state_dict[key]
        codes, scales, record = entries_of(param.sharded)
        cast(RaggedDTensor, scales).save_apart()
        state_dict.update({key + CODES: codes, key + SCALES: scales, key + FORMAT: record})
        for name in Entries._fields:  # get_model_state_dict looks keys up as attributes, and uses no value
            vars(param.sharded).setdefault(name, "an entry of state dicts")

    def join_entries(self, param: ManagedParam[Any], state_dict: dict[str, Any], key: str) -> None:
        """Replace codes and scales by the parameter's entry. Raises ValueError if one is missing, or not alone."""
        parts = [key + CODES, key + SCALES, key + FORMAT]
        keys = [name for name in (key, *parts) if name in state_dict]
        if keys in ([], [key]):
            return
        if keys == parts[:2]:
            fmt = _format(self.plan)
            raise ValueError(
                f"load_state_dict: {keys} without {parts[2]!r}, which says their blocks; if they were saved in {fmt}, "
                f"add torch.tensor({fmt.record}) under that name"
            )
        if keys != parts:
            raise ValueError(
                f"load_state_dict: {keys} for a parameter that is kept as codes; expected {parts[0]!r}, {parts[1]!r} "
                f"and {parts[2]!r}, or {key!r} alone"
            )
        entries = Entries(*map(state_dict.pop, parts))
        state_dict[key] = from_entries(self.plan, self.plan_of(param), param.sharded, entries)

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is read back from codes, distributed as they are."""
        sharded: Any = tensor.detach()
        values: torch.Tensor = sharded.with_local(sharded.local.dequantize())
        return values

    def write_back(self, param: ManagedParam[Any], values: torch.Tensor) -> None:
        """Quantize this rank's slice of whole values, if they differ from the codes' values."""
        local = param.local
        assert isinstance(local, BlockQuantizedTensor)
        if not local.dequantize().equal(values):
            local.copy_(values)

    def without_memory(self, local: torch.Tensor) -> torch.Tensor:
        """Codes and scales like these without memory: values read as NaN."""
        assert isinstance(local, BlockQuantizedTensor)
        codes = local.codes.new_zeros(()).expand(local.codes.shape)
        return local.around(codes, local.scales.new_full((), float("nan")).expand(local.scales.shape))

    def memory(self) -> GroupMemory:
        """The codes are the shard, and there are no gradients."""
        coded = super().memory()
        return replace(coded, weights=coded.codes, codes=0, gradients=0, reduced=0, reducing=())

"""EMA: an exponential moving average of weights, over the flat memory of this rank's shards.

    weights     | w1 w1 w1 . w2 w2 . . | ...     average <- average + (1 - decay) * (weight - average)
    averages    | a1 a1 a1 . a2 a2 . . | ...     neighbors in memory are one run: one lerp for all of them

    dtype    bytes   an update                              in `swapped`
    fp32     4       in place; narrower weights are         contents trade places; of narrower weights a copy is kept
                     widened in chunks
    bf16     2       in fp32 chunks, rounded at random by   contents trade places; of other weights a copy is kept
                     an element's global index
    int8     1       as bf16, with a scale for each block   a copy of the weights is kept

An element's numbers do not depend on where its tensor is cut. Nothing here communicates.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from block_optim.core._torch_compat import local_of, locals_of, version_of
from block_optim.core.load import own_values, put_values
from block_optim.core.options import check_choice, check_count, check_flag, check_range
from block_optim.core.params import Param, strides_of
from block_optim.core.runs import FlatSpace
from block_optim.ema.batches import Batch, batches_of, trade
from block_optim.ema.int8 import CodedAverages, is_coded, layout_of
from ragged_shard import DISTRIBUTED

Weights = nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

# What torch.compile and activation checkpointing put into names.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
_swapped: dict[torch.Tensor, str] = {}  # parameters whose contents are averages, of any EMA, and their names


class EMA:
    """An exponential moving average of the parameters that train; buffers and frozen parameters have none.

    Averages begin with the weights that are there: build it after these are loaded, and load averages after that. Call
    `update` after each step of the optimizer. It communicates nothing. In fp32 its bits are those of
    ``average.lerp_(weight, 1 - decay)`` at any world size.

    Args:
        params: a module, or tensors or named tensors: plain, DTensors (FSDP2's too) or RaggedDTensors. Give a sharded
            model as a module, after `fully_shard`: `swapped` needs it.
        decay: share of the average that an update keeps, in [0, 1); the attribute may be set between updates.
        dtype: of averages: fp32 (fp64 of fp64 parameters), or bf16 or int8, which are rounded at random. int8 has an
            fp32 scale for each block, on the blocks of AdamW8bit's states, so the layout must fit these; vectors and
            tensors of fewer than 4096 elements are averaged in fp32.
        warmup: keep at most (1 + n) / (10 + n) in an update that n others came before.
        seed: of the rounding; its random bits depend on seed, name, number of the update and element only.

    Attributes:
        updates: how many updates the averages have had.

    Raises:
        ValueError: an option or a parameter that does not fit, named.
    """

    def __init__(
        self,
        params: Weights,
        decay: float,
        *,
        dtype: torch.dtype = torch.float32,
        warmup: bool = False,
        seed: int = 0,
    ) -> None:
        check_choice("dtype", dtype, (torch.float32, torch.bfloat16, torch.int8))
        check_flag("warmup", warmup)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}: expected an integer")
        self.decay, self.updates = decay, 0
        self._dtype, self._warmup, self._seed = dtype, warmup, seed
        self._rate()
        self._module = params if isinstance(params, nn.Module) else None
        self._reshard()
        self._entries = dict(_entries(params))  # every name, a tied parameter's too
        names = {tensor: name for name, tensor in reversed(self._entries.items())}
        self._frozen = {name: tensor for name, tensor in self._entries.items() if names[tensor] == name}
        self._params: dict[str, Param] = {}
        self._averages: dict[
            str, torch.Tensor
        ] = {}  # or their codes, in the parameters' shapes and placements
        self._scales: dict[str, torch.Tensor] = {}  # of codes
        self._layouts: dict[str, tuple[Any, ...]] = {}
        self._places: list[Any] = []
        self._batches: list[Batch | CodedAverages] = []
        self._coded: dict[str, CodedAverages] = {}
        self._follow()
        if not self._params and self._module is None:
            raise ValueError(
                f"EMA: none of the {len(self._frozen)} tensors that it was given requires a gradient"
            )

    # ---------------------------------------------------------------- update

    @torch.no_grad()
    def update(self) -> None:
        """Move averages towards the weights.

        A parameter that has begun to train gets an average, which begins with its value.

        Raises:
            RuntimeError: inside `swapped`.
            ValueError: a parameter that was added, replaced, or has another shape, dtype or device than before.
        """
        self._refuse_swapped("update()")
        rate = self._rate()
        self._follow()
        self.updates += 1
        for batch in self._batches:
            batch(1 - rate, self._seed, self.updates)

    def _rate(self) -> float:
        """Share of the average that the next update keeps."""
        check_range("decay", self.decay, 0, 1)
        return min(self.decay, (1 + self.updates) / (10 + self.updates)) if self._warmup else self.decay

    def _follow(self) -> None:
        """Begin averages of parameters that train now, and prepare the calls again if memory is elsewhere."""
        self._check_module(gathered=True)
        if fresh := [Param(t, name) for name, t in self._frozen.items() if t.requires_grad]:
            self._begin(fresh)
        places = [(t.data_ptr(), t.dtype, t.shape, t.device) for t in self._locals()]
        if places == self._places:
            return
        for name, param in self._params.items():
            if (layout := _layout(param.tensor)) != self._layouts[name]:
                raise ValueError(
                    f"{name}: it is {layout}, and was {self._layouts[name]} when its average began (shape, dtype, "
                    "placements; device, shape and stride of what this rank has); build EMA after the model was moved"
                )
        self._prepare()
        self._places = places

    def _prepare(self) -> None:
        """Prepare the calls that update the averages."""
        wide = [name for name in self._params if name not in self._scales]
        params, averages = [self._params[n] for n in wide], [self._averages[n] for n in wide]
        coded: dict[torch.device, list[str]] = {}
        for name in self._scales:
            coded.setdefault(self._params[name].device, []).append(name)
        parts = [(names, self._coded_averages(names)) for names in coded.values()]
        self._coded = {name: part for names, part in parts for name in names}
        self._batches = [*batches_of(params, locals_of(averages)), *(part for _, part in parts)]

    def _coded_averages(self, names: list[str]) -> CodedAverages:
        codes = locals_of(self._averages[name] for name in names)
        scales = [local_of(self._scales[name]).view(-1) for name in names]
        return CodedAverages([self._params[name] for name in names], codes, scales)

    def _locals(self) -> list[torch.Tensor]:
        return locals_of(param.tensor for param in self._params.values())

    @torch.no_grad()
    def _begin(self, params: list[Param]) -> None:
        """Make averages from the weights, neighbors where these are."""
        kinds: dict[Any, list[Param]] = {}
        for param in params:
            self._check(param)
            kinds.setdefault((self._dtype_of(param), param.device), []).append(param)
        for param in params:
            self._params[param.name] = param
            self._layouts[param.name] = _layout(param.tensor)
            del self._frozen[param.name]
        for (dtype, device), members in kinds.items():
            space = FlatSpace([param.local for param in members])
            for param, average in zip(members, space.views(space.zeros(dtype, device)), strict=True):
                self._averages[param.name] = param.wrap(average)
                if dtype != torch.int8:
                    average.copy_(param.local)
            if dtype == torch.int8:
                self._begin_codes(members)
        self._averages = {name: self._averages[name] for name in self._params}

    def _dtype_of(self, param: Param) -> torch.dtype:
        """Dtype of the parameter's average, or of its codes."""
        if self._dtype == torch.float32 or (self._dtype == torch.int8 and not is_coded(param)):
            return torch.promote_types(param.dtype, torch.float32)
        return self._dtype

    def _begin_codes(self, params: list[Param]) -> None:
        """Make scales, and codes of the weights."""
        for param in params:
            layout = layout_of(param)
            scales = torch.zeros(layout.num_scales, device=param.device)
            self._scales[param.name] = layout.wrap(param, scales)
        self._coded_averages([param.name for param in params]).begin()

    def _check(self, param: Param) -> None:
        """Raise ValueError if there can be no average of a parameter."""
        param.check_dense()
        local = param.local
        narrow = self._dtype_of(param).itemsize < 4
        if narrow and not (param.holding.in_runs and local.is_contiguous() and param.dtype.itemsize <= 4):
            raise ValueError(
                f"{param.name}: dtype={self._dtype} needs parameters of at most 4 bytes an element, of which a rank "
                f"has one contiguous run; it is {param.dtype} with placements {param.placements} and stride "
                f"{local.stride()}. Use torch.float32"
            )
        if self._dtype_of(param) == torch.int8:
            layout_of(param)

    # ---------------------------------------------------------------- evaluation

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the parameters the averages' values inside a ``with``; they are restored also if the body raises.

        Reshards the units of `fully_shard` before and after, so that no gathered values of the wrong kind remain.
        Takes the memory of a chunk; for weights in another dtype than their averages that of a copy of them.

        Raises:
            RuntimeError: inside `swapped` of the same parameters; if a parameter stays gathered; after a body that
                wrote to parameters. A step of an optimizer in the body raises, too.
            ValueError: as `update`; or if distributed tensors were given without their module.
        """
        self._refuse_swapped("swapped()")
        self._follow()
        self._check_resharded()
        with ExitStack() as stack:
            stack.callback(self._reshard)
            for name, param in self._params.items():
                stack.callback(self._restore, name, self._exchange(name))
                _swapped[param.tensor] = name
            stack.callback(register_optimizer_step_pre_hook(_refuse_step).remove)
            before = [(t.data_ptr(), version_of(t)) for t in self._locals()]
            yield
            written = self._written_since(before)
        self._check_resharded()
        if written:
            raise RuntimeError(
                f"{written}: it, or a tensor in the same memory, was written to inside swapped(). The weights are as "
                "before, but their averages may be what was written; load them again, and train outside of swapped()"
            )

    @torch.no_grad()
    def _exchange(self, name: str) -> torch.Tensor | None:
        """Put an average into its parameter. Returns a copy of the weights if they are not kept in its place."""
        weight, average = self._params[name].local, local_of(self._averages[name])
        if weight.dtype == average.dtype:
            trade(average, weight)
            return None
        kept = weight.clone()
        if name in self._coded:
            self._coded[name].decode(name)
        else:
            weight.copy_(average)
        return kept

    @torch.no_grad()
    def _restore(self, name: str, kept: torch.Tensor | None) -> None:
        """Put the weights back into their parameter, also if that is on another device now."""
        param = self._params[name]
        del _swapped[param.tensor]
        weight, average = param.local, local_of(self._averages[name])
        if kept is not None:
            weight.copy_(kept)
        elif (weight.dtype, weight.shape, strides_of(weight)) == (
            average.dtype,
            average.shape,
            strides_of(average),
        ):
            trade(average, weight)
        else:
            raise RuntimeError(
                f"{name}: inside swapped() it became {_layout(param.tensor)}, and was {self._layouts[name]}; it has "
                "the average now, and the average has its weights"
            )

    def _written_since(self, before: list[tuple[int, int]]) -> str | None:
        """The first parameter that is where it was, and was written to; neighbors may share the count."""
        for name, t, (address, version) in zip(self._params, self._locals(), before, strict=True):
            if t.data_ptr() == address and version_of(t) != version:
                return name
        return None

    def _reshard(self) -> None:
        """Free the gathered parameters of all units of the module."""
        for module in self._module.modules() if self._module is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _check_resharded(self) -> None:
        """Reshard; raise if the module has other parameters than this EMA's."""
        distributed = next((name for name, p in self._params.items() if p.mesh is not None), None)
        if self._module is None and distributed is not None:
            raise ValueError(
                f"{distributed}: EMA has tensors of a sharded model and cannot reshard it; build it from the module"
            )
        self._reshard()
        self._check_module(gathered=False)

    def _check_module(self, *, gathered: bool) -> None:
        """Raise unless the module's parameters are those that it had, sharded, or ``gathered`` if that may be."""
        if self._module is None:
            return
        current = dict(_entries(self._module))
        for name in self._entries | current:
            own, now = self._entries.get(name), current.get(name)
            if now is own or (own is None and now is not None and not now.requires_grad):
                continue
            if now is None or not isinstance(own, DISTRIBUTED) or _placement(now) == _placement(own):
                raise ValueError(
                    f"{name}: the module has another tensor there, or none, than when EMA was built (fully_shard, an "
                    "assignment, load_state_dict(assign=True), a new layer or a parametrization); build EMA after that"
                )
            if not gathered:
                raise RuntimeError(
                    f"{name}: the module has the gathered parameter there, which does not follow the shards; call "
                    "reshard() on its unit, or build EMA from the module that has the unit"
                )

    def _refuse_swapped(self, what: str) -> None:
        name = next((name for name, p in self._params.items() if p.tensor in _swapped), None)
        if name is not None:
            raise RuntimeError(
                f"{what} inside swapped(): {name} has the value of an average; call it outside"
            )

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """``averages`` by name, in the parameters' placements and sharing memory, and the count of ``updates``.

        An int8 EMA has ``codes`` and ``scales`` of the parameters that it keeps in 8 bits. Distributed checkpoints take
        an EMA as it is, ``dcp.save({"ema": ema})``, and load at any world size.
        """
        self._refuse_swapped("state_dict()")
        self._follow()
        return {**self._tensors(), "updates": self.updates}

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of the state dict, by part and name."""
        averages = {n: t for n, t in self._averages.items() if n not in self._scales}
        if self._dtype != torch.int8:
            return {"averages": averages}
        codes = {n: t for n, t in self._averages.items() if n in self._scales}
        return {"averages": averages, "codes": codes, "scales": dict(self._scales)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy averages into those that are there, rounded to nearest if they are narrower. Communicates nothing.

        Takes what `state_dict` returned in the same placements, or full plain tensors, of which a rank takes its own.

        Raises:
            ValueError: names, shapes or placements that do not fit, or codes for averages; nothing was changed.
        """
        self._refuse_swapped("load_state_dict()")
        self._follow()
        own, updates = self._tensors(), state_dict["updates"]
        if updates != 0:
            check_count("updates", updates)
        if own.keys() != state_dict.keys() - {"updates"}:
            raise ValueError(
                f"the state dict has {sorted(state_dict.keys() - {'updates'})}, an EMA of dtype={self._dtype} has "
                f"{sorted(own)}; build EMA with the dtype that was saved"
            )
        values = {part: self._fitting(part, tensors, state_dict[part]) for part, tensors in own.items()}
        for part, tensors in own.items():
            put_values(tensors, values[part])
        self.updates = updates

    def _fitting(
        self, part: str, own: dict[str, torch.Tensor], values: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """This rank's elements of a part of a state dict."""
        if different := sorted(values.keys() ^ own.keys()):
            raise ValueError(
                f"the state dict has {len(values)} {part}, this EMA {len(own)}; {different[0]} is in "
                "one of them only. Build EMA from the same module, with the same parameters frozen"
            )
        for name, value in values.items():
            if (value.dtype == torch.int8) != (part == "codes"):
                raise ValueError(
                    f"{name}: its {part} in the state dict are {value.dtype}; they were converted"
                )
        return own_values("EMA", own, dict(values))


def _entries(params: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors; a module's tied parameter by all its names, without those of wrappers."""
    if isinstance(params, torch.Tensor):
        raise TypeError("EMA was given one tensor; give it a module or a list")
    if isinstance(params, nn.Module):
        params = params.named_parameters(remove_duplicate=False)
    seen: dict[str, torch.Tensor] = {}
    for i, entry in enumerate(params):
        name, tensor = entry if isinstance(entry, tuple) else (None, entry)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"EMA was given {tensor!r}: expected a module, tensors or (name, tensor) pairs")
        name = f"parameter {i} of shape {tuple(tensor.shape)}" if name is None else _WRAPPERS.sub("", name)
        if seen.setdefault(name, tensor) is not tensor:
            raise ValueError(f"EMA was given two parameters named {name!r}")
        yield name, tensor


def _placement(tensor: torch.Tensor) -> Any:
    return (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DISTRIBUTED) else None


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and placements, and the device, shape and strides of this rank's part."""
    local, placements = local_of(tensor), tuple(getattr(tensor, "placements", ()))
    return (
        tuple(tensor.shape),
        tensor.dtype,
        placements,
        str(local.device),
        tuple(local.shape),
        strides_of(local),
    )


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param in _swapped:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside EMA.swapped(): {_swapped[param]} has the value of an "
                "average; train outside"
            )

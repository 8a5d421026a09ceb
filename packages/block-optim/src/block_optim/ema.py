"""EMA: an exponential moving average of weights, on this rank's shards.

    average <- average + (1 - decay) * (weight - average)

    dtype    bytes   an update
    fp32     4       in place; narrower weights are widened
    bf16     2       in fp32 chunks, rounded at random by an element's global index, so that small updates count

An element's numbers do not depend on where its tensor is cut. Nothing here communicates.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from block_optim.core._torch_compat import foreach_lerp_, local_of
from block_optim.core.options import check_choice, check_count, check_flag, check_range
from block_optim.core.params import Param
from block_optim.core.rounding import CHUNK, Rounder
from block_optim.core.stateful import own_values, put_values

Weights = nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

# Parts of names that torch.compile and activation checkpointing add.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")


class EMA:
    """An exponential moving average of the parameters that train; buffers and frozen parameters have none.

    Averages begin with the weights that are there: build it after these are loaded, and load averages after that. Call
    `update` after each step of the optimizer. It communicates nothing. In fp32 it has the bits of
    ``average.lerp_(weight, 1 - decay)`` at any world size.

    Args:
        params: a module, or tensors or named tensors: plain, DTensors (FSDP2's too) or RaggedDTensors. Give a sharded
            model as a module, after `fully_shard`: `swapped` reshards it.
        decay: share of the average that an update keeps, in [0, 1); the attribute may be set between updates.
        dtype: of averages: fp32 (fp64 of fp64 parameters), or bf16, rounded at random.
        warmup: keep at most (1 + n) / (10 + n) in an update that n others came before.

    Attributes:
        updates: how many updates the averages have had.

    Raises:
        ValueError: an option or a parameter that does not fit, named.
    """

    def __init__(
        self, params: Weights, decay: float, *, dtype: torch.dtype = torch.float32, warmup: bool = False
    ) -> None:
        check_choice("dtype", dtype, (torch.float32, torch.bfloat16))
        check_flag("warmup", warmup)
        self.decay, self.updates = decay, 0
        self._dtype, self._warmup, self._swapped = dtype, warmup, False
        self._share()
        self._module = params if isinstance(params, nn.Module) else None
        self._given = [] if isinstance(params, nn.Module) else list(_named(params))
        self._params: dict[str, Param] = {}
        self._averages: dict[str, torch.Tensor] = {}
        self._rounders: dict[torch.device, Rounder] = {}
        self._follow()
        if not self._params and self._module is None:
            raise ValueError(f"EMA: none of the {len(self._given)} given tensors requires a gradient")

    @torch.no_grad()
    def update(self) -> None:
        """Move averages towards the weights.

        A parameter that has begun to train gets an average, which begins with its value.

        Raises:
            RuntimeError: inside `swapped`.
            ValueError: a parameter that was replaced, or has another shape or dtype than before.
        """
        self._refuse_swapped("update()")
        share = 1 - self._share()
        self._follow()
        self.updates += 1
        pairs = [(param, param.local, local_of(self._averages[name])) for name, param in self._params.items()]
        kinds: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for param, weight, average in pairs:
            if average.dtype == torch.bfloat16:
                self._update_narrow(param, average, weight, share)
            else:
                kinds[average.dtype, average.device].append((average, weight.to(average.dtype)))
        for same in kinds.values():
            foreach_lerp_([average for average, _ in same], [weight for _, weight in same], share)

    def _update_narrow(self, param: Param, average: torch.Tensor, weight: torch.Tensor, share: float) -> None:
        if average.device not in self._rounders:
            self._rounders[average.device] = Rounder(CHUNK, average.device)
        rounder, first = self._rounders[average.device], param.start or 0
        chunks = (t.view(-1).split(rounder.numel) for t in (average, weight))
        for old, new in zip(*chunks, strict=True):
            wide = old.float().lerp_(new.float(), share)
            rounder(wide, old, param.name, self.updates, first)
            first += wide.numel()

    def _share(self) -> float:
        """Share of the average that the next update keeps."""
        check_range("decay", self.decay, 0, 1)
        return min(self.decay, (1 + self.updates) / (10 + self.updates)) if self._warmup else self.decay

    @torch.no_grad()
    def _follow(self) -> None:
        """Reshard, check that every average's parameter is still there, and begin averages of newly trained ones."""
        self._reshard()
        entries = dict(self._given if self._module is None else _named(self._module))
        for name, param in self._params.items():
            if entries.get(name) is not param.tensor:
                raise ValueError(
                    f"{name}: the module has another tensor there, or none, than when its average began (fully_shard, "
                    "an assignment, load_state_dict(assign=True), a unit that is gathered); build EMA after that"
                )
            param.check_layout()
        averaged = {param.tensor for param in self._params.values()}
        for name, tensor in entries.items():
            if tensor.requires_grad and tensor not in averaged:
                self._begin(Param(tensor, name))
                averaged.add(tensor)

    def _begin(self, param: Param) -> None:
        local, dtype = param.local, self._dtype
        if dtype == torch.float32:
            dtype = torch.promote_types(param.dtype, torch.float32)
        elif not (param.holding.in_runs and local.is_contiguous() and param.dtype.itemsize <= 4):
            raise ValueError(
                f"{param.name}: dtype={dtype} needs parameters of at most 4 bytes an element, of which a rank has one "
                f"contiguous run; it is {param.dtype} with placements {param.placements} and stride {local.stride()}. "
                "Use torch.float32"
            )
        param.check_dense()
        self._params[param.name] = param
        self._averages[param.name] = param.wrap(local.to(dtype, copy=True))

    # ---------------------------------------------------------------- evaluation

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the parameters the averages' values inside a ``with``; they are restored also if the body raises.

        Takes the memory of a copy of this rank's weights. Writes of the body to parameters are lost: train outside.
        Reshards the units of `fully_shard` before and after, so that no gathered values of the wrong kind remain.

        Raises:
            RuntimeError: inside `swapped`.
            ValueError: as `update`; or if distributed tensors were given without their module.
        """
        self._refuse_swapped("swapped()")
        self._follow()
        distributed = next((name for name, p in self._params.items() if p.mesh is not None), None)
        if self._module is None and distributed is not None:
            raise ValueError(
                f"{distributed}: EMA has tensors of a sharded model and cannot reshard it; build it from the module"
            )
        with torch.no_grad():
            kept = {name: param.local.clone() for name, param in self._params.items()}
            self._write(self._averages)
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            self._reshard()
            with torch.no_grad():
                self._write(kept)

    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self._params[name].local.copy_(local_of(value))

    def _reshard(self) -> None:
        """Free the gathered parameters of all units of the module."""
        for module in self._module.modules() if self._module is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _refuse_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(
                f"{what} inside swapped(): the parameters have the averages' values; call it outside"
            )

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """``averages`` by name, in the parameters' placements and sharing memory, and the count of ``updates``.

        Distributed checkpoints take an EMA as it is, ``dcp.save({"ema": ema})``, and load at any world size.
        """
        self._follow()
        return {"averages": dict(self._averages), "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy averages into the existing ones, rounded to nearest if they are narrower. Communicates nothing.

        Takes what `state_dict` returned in the same placements, or full plain tensors, of which a rank takes its own.

        Raises:
            ValueError: names, shapes or placements that do not fit; nothing was changed.
        """
        self._follow()
        values, updates = dict(state_dict["averages"]), state_dict["updates"]
        if updates != 0:
            check_count("updates", updates)
        if different := sorted(values.keys() ^ self._averages.keys()):
            raise ValueError(
                f"the state dict has {len(values)} averages, this EMA {len(self._averages)}; {different[0]} is in one "
                "of them only. Build EMA from the same module, with the same parameters frozen"
            )
        put_values(self._averages, own_values("EMA", self._averages, values))
        self.updates = updates


def _named(params: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, without the names of wrappers; a tied parameter by its first name."""
    if isinstance(params, torch.Tensor):
        raise TypeError("EMA was given one tensor; give it a module or a list")
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    seen: dict[str, torch.Tensor] = {}
    for i, entry in enumerate(params):
        name, tensor = entry if isinstance(entry, tuple) else (None, entry)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"EMA was given {tensor!r}: expected a module, tensors or (name, tensor) pairs")
        name = f"parameter {i} of shape {tuple(tensor.shape)}" if name is None else _WRAPPERS.sub("", name)
        if seen.setdefault(name, tensor) is not tensor:
            raise ValueError(f"EMA was given two parameters named {name!r}")
        yield name, tensor

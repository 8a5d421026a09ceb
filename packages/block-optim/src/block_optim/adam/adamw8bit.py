"""AdamW with 8-bit states, one scale for each block of the global tensor."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from block_optim.adam.adamw import Moments, check_adamw_options
from block_optim.adam.q8.rule import QuantizedRule
from block_optim.core.base import BlockOptimizer, is_first_rank
from block_optim.core.gradients import StepGradients
from block_optim.core.grid import AUTO, auto_block, block_for, check_block, scale_layout
from block_optim.core.options import check_count, check_execution
from block_optim.core.params import Group, Param
from layout_planner import Block, Elements, Tile

_LOG = logging.getLogger("block_optim")
QuantizeRule = Callable[[str, torch.Tensor], bool]

EMBEDDING_NAMES = ("embed", "wte", "wpe")


def matrices_but_embeddings(name: str, param: torch.Tensor) -> bool:
    """The default rule: 8-bit states for tensors of two or more dimensions whose name is not an embedding's.

    A name is an embedding's if it contains "embed", "wte" or "wpe". Parameters without names cannot be distinguished,
    which is logged once: pass ``model.named_parameters()``.
    """
    return param.ndim >= 2 and not any(word in name.lower() for word in EMBEDDING_NAMES)


class AdamW8bit(BlockOptimizer):
    """AdamW whose moments take 8 bits each, with one fp32 scale for each block and moment.

    Blocks are on the global tensor's grid, and global shapes and names decide which tensors have 8-bit states, so that
    equal gradients give the same bits at any world size, in equal blocks (see ``block``). `step` communicates nothing
    except the agreement on non-finite gradients (see `BlockOptimizer`). After 8-bit Adam (Dettmers et al., arXiv
    2110.02861), with other codes.

    States: ``step``, ``exp_avg`` and ``exp_avg_sq`` (uint8, in the parameter's shape and placement), ``exp_avg_scale``
    and ``exp_avg_sq_scale`` (fp32, one number a block, cut where the parameter is), and ``format`` (int64), which
    records the block and the table of codes. The code in ``exp_avg_sq`` is of the second moment's root.

    Args:
        params: tensors, named tensors or groups; plain, DTensors or RaggedDTensors; each rank holds whole blocks.
        lr, betas, eps, weight_decay, amsgrad, maximize, capturable, differentiable: as in `AdamW`.
        block: `Elements(n)` or n consecutive elements, or `Tile(rows, columns)` of each matrix. "auto": by global
            shape, `Tile(1, 256)` of matrices, which no cut between rows goes through, so that states move between
            one process, DDP, FSDP2 and fsdp-runtime; where torch's Shard cuts the last dimension, also by the number
            of its ranks. Loaded states keep the block that they were saved in.
        min_8bit_numel: tensors with fewer elements (of the global tensor) have fp32 states.
        quantize: a rule ``(name, parameter) -> bool``: which tensors have 8-bit states; in a group also True or False.
        stochastic_rounding: as in `AdamW`.
        foreach, fused: have no effect.

    Raises:
        ValueError: an option that does not fit; a layout that cuts a block, with the parameter and what to do. On
            loading, states with codes of another table or with a block that does not fit ``block`` or the ranks' cuts.
    """

    format_options = ("block", "min_8bit_numel")
    recorded_options = ("block",)
    requires_blocks = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block: Elements | Tile | str = AUTO,
        min_8bit_numel: int = 4096,
        quantize: QuantizeRule = matrices_but_embeddings,
        stochastic_rounding: bool = False,
        maximize: bool | None = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        check_execution(foreach, fused, amsgrad=amsgrad, capturable=capturable, differentiable=differentiable)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "block": block, "min_8bit_numel": min_8bit_numel, "quantize": quantize,
            "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        super().__init__(params, defaults)

    @classmethod
    @override
    def block_of(cls, name: str, param: torch.Tensor, options: Mapping[str, Any]) -> Block | None:
        """Return the block of a tensor that gets 8-bit states; None for others, as fp32 states may be cut anywhere."""
        block = auto_block(param.shape) if options["block"] == AUTO else check_block(options["block"])
        return block if is_quantized(name, param, options["min_8bit_numel"], options["quantize"]) else None

    @override
    def setup(self) -> None:
        self._wide = Moments()
        self._narrow = QuantizedRule()
        # Of an optimizer that is copied or unpickled, the choices are kept: rules of groups may not be picklable.
        self._earlier: dict[torch.Tensor, bool] = self.__dict__.get("_chosen", {})
        self._chosen: dict[torch.Tensor, bool] = {}
        self._rules: dict[int, QuantizeRule | bool] = {}

    @override
    def check_options(self, group: Group) -> None:
        check_adamw_options(group)
        if id(group) not in self.known_options:
            self._rules[id(group)] = group.pop("quantize", self.defaults["quantize"])
        elif "quantize" in group:
            raise ValueError("quantize: which tensors have 8-bit states is chosen when a group is added")
        least = group["min_8bit_numel"]
        if least != 0:
            check_count("min_8bit_numel", least)
        if group["block"] != AUTO:
            group["block"] = str(check_block(group["block"]))

    @override
    def check_group(self, group: Group, params: list[Param]) -> None:
        least, rule = group["min_8bit_numel"], self._rules[id(group)]
        for param in params:
            param.check_dense()
            if param.tensor not in self._chosen:
                earlier = self._earlier.pop(param.tensor, None)
                new = is_quantized(param.name, param.tensor, least, rule) if earlier is None else earlier
                self._chosen[param.tensor] = new
                if new and earlier is None and rule is matrices_but_embeddings and "param_names" not in group:
                    _log_unnamed()
            if self._chosen[param.tensor]:
                _check_quantizable(param, group["block"])

    @override
    def check_blocks(self, params: list[Param]) -> None:
        """Check nothing: `check_group` has checked the parameters that get 8-bit states."""

    @override
    def init_states(self, group: Group, params: list[Param]) -> None:
        self._narrow.init_states([p for p in params if self._chosen[p.tensor]], self.state)
        self._wide.init_states([p for p in params if not self._chosen[p.tensor]], self.state)

    @override
    def read_saved(self, param: Param, saved: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        if not self._chosen[param.tensor] or "exp_avg_scale" not in saved:  # other keys, which are refused
            return saved
        block = options.get("block", param.group["block"])
        return self._narrow.read_saved(param, saved, self.state[param.tensor], block)

    @override
    def invalidate(self) -> None:
        # A parameter that is added again is chosen again.
        self._chosen = {p.tensor: self._chosen[p.tensor] for p in self.members}
        self._narrow.bind([p for p in self.trained if self._chosen[p.tensor]])

    @override
    def update(self, active: StepGradients) -> None:
        coded = [self._chosen[p.tensor] for p in active.params]
        self._narrow.update(active.select([i for i, is_coded in enumerate(coded) if is_coded]))
        self._wide.update(active.select([i for i, is_coded in enumerate(coded) if not is_coded]), self.state)

    @override
    def copied_attributes(self) -> dict[str, Any]:
        return {**super().copied_attributes(), "_chosen": self._chosen}


@functools.cache
def _log_unnamed() -> None:
    """Log, once in a process, that the default rule does not see embeddings."""
    if is_first_rank():
        _LOG.warning(
            "AdamW8bit: parameters without names have 8-bit states, embeddings too, which by default have fp32 states; "
            "pass model.named_parameters(), or a rule of your own (quantize=)"
        )


def is_quantized(name: str, param: torch.Tensor, least: int, rule: QuantizeRule | bool) -> bool:
    """Whether a tensor has 8-bit states, by its global shape and its name."""
    if isinstance(rule, bool):
        return rule and param.numel() > 0
    return param.numel() >= max(least, 1) and bool(rule(name, param))


def _check_quantizable(param: Param, chosen: Block | str) -> None:
    if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{param.name}: 8-bit states are for fp32, bf16 and fp16, not {param.dtype}")
    param.check_row_major()
    try:
        scale_layout(param, block_for(param, chosen))
    except ValueError as error:
        raise ValueError(
            f"{error}; choose a block that fits between the cuts, or keep its states in fp32 with quantize=False in "
            "its group"
        ) from None

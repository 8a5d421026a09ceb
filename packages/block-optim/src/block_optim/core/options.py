"""Checks of options. Each raises ValueError with the option's name, what was given and what was expected."""

import difflib
import inspect
import math
import numbers
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

# Options of torch's optimizers and Distributed Shampoo that one here may not have: values that ask for nothing, and
# the answer to others.
_TORCH_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "amsgrad": (
        (False, None),
        "not here; its third state would grow the memory by half for a maximum that has not been shown to help; use "
        "torch.optim.AdamW for it",
    ),
    "foreach": ((False, None), "there is one implementation, over many tensors at once; leave it out"),
    "capturable": ((False, None), "CUDA graphs of the step are not supported; leave it out"),
    "differentiable": ((False, None), "the step writes in place and is not differentiable; leave it out"),
    "fused": ((False, None), "this optimizer has one implementation, which needs no choice; leave it out"),
    "maximize": ((False, None), "this optimizer descends; negate the loss, or use AdamW, which has it"),
    "decoupled_weight_decay": (
        (True, None),
        "weight decay is never added to the gradient here; set weight_decay=0, or use torch.optim.Adam for that",
    ),
    "epsilon": (
        (None,),
        "Distributed Shampoo's epsilon is an absolute ridge of the factors; Shampoo's root_epsilon is relative to a "
        "factor's norm, and eps is added to the root of second moments: say which is meant",
    ),
}
_TAG = re.compile(
    r"name|(initial|base|max|min|swa|last)_\w+|lr_\w+|\w+_(lr|momentum)"
)  # schedulers' and users' notes


def answer_torch_options(given: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Raise ValueError for an option of torch's optimizers that asks for what there is not here."""
    for name, (idle, why) in _TORCH_OPTIONS.items():
        if name in own or name not in given or any(given[name] is value for value in idle):
            continue
        if not (name == "decoupled_weight_decay" and given.get("weight_decay") == 0):
            raise ValueError(f"{name}={given[name]!r}: {why}")


def says_nothing(name: str) -> bool:
    """Whether an option of torch's optimizers, once answered, has no more meaning."""
    return name in _TORCH_OPTIONS


def check_known(given: Mapping[str, Any], own: Collection[str], who: str, *, strict: bool = False) -> None:
    """Raise ValueError for a key of a group that means an option which the optimizer does not have.

    Keys that nothing here knows are the user's own notes, as in torch's groups. They are refused with ``strict``, and
    where they look like a misspelt option.
    """
    for name, value in given.items():
        if name in own or name in ("params", "param_names", *_TORCH_OPTIONS):
            continue
        near = difflib.get_close_matches(name, own, 1, 0.8)
        tagged = _TAG.fullmatch(name) is not None
        if not tagged and (strict or near or name in _published_options()):
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name}={value!r}: {who} has no option {name!r} for a group{hint}")


def _published_options() -> set[str]:
    """The options of torch's optimizers."""
    kinds = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]
    return {
        name
        for kind in kinds
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
        for name in inspect.signature(kind).parameters
    }


def rename(given: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Put options that have a published name under their own one, in place."""
    for alias, name in aliases.items():
        if alias in given:
            if name in given and given[name] != given[alias]:
                raise ValueError(
                    f"{alias}={given[alias]!r} and {name}={given[name]!r} are one option: say it once"
                )
            given[name] = given.pop(alias)


def check_lr(lr: Any) -> float | torch.Tensor:
    """``lr`` as it is kept: a tensor of one element, whose later changes are followed, or a float.

    Raises:
        ValueError: it is neither, or not >= 0.
    """
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1 or lr.is_complex():
            raise ValueError(f"lr: expected one number, got a {lr.dtype} tensor of shape {tuple(lr.shape)}")
        return lr
    if not is_number(lr) or not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr={lr!r}: expected a number >= 0 or a tensor of one element")
    return float(lr)


def check_lr_value(lr: float | torch.Tensor) -> None:
    """Raise ValueError for a tensor that holds a number which `check_lr` would refuse. Waits for its device."""
    if isinstance(lr, torch.Tensor) and not lr.is_meta:
        check_lr(lr.item())


def is_number(value: Any) -> bool:
    """Whether a real number: Python's or NumPy's, but no bool and no tensor."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_range(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raise unless ``low <= value < high``."""
    if not is_number(value) or not low <= value < high:
        wanted = f">= {low}" if high == math.inf else f"in [{low}, {high})"
        hint = "; a tensor may only be lr" if isinstance(value, torch.Tensor) else ""
        raise ValueError(f"{name}={value!r}: expected a number {wanted}{hint}")


def check_betas(betas: Any) -> tuple[Any, Any]:
    """Raise ValueError unless two values; returns them."""
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise ValueError(f"betas={betas!r}: expected two numbers") from None
    return beta1, beta2


def check_flag(name: str, value: Any) -> None:
    """Raise unless True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected True or False")


def check_count(name: str, value: Any) -> None:
    """Raise unless a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a positive integer")


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise unless one of the values."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")

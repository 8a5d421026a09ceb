"""Checks of options. Each raises ValueError with the option's name, what was given and what was expected."""

import math
from typing import Any

import torch


def check_lr(lr: Any) -> None:
    """Raise unless ``lr`` is a number >= 0 or a tensor of one element."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr: expected one number, got a tensor of shape {tuple(lr.shape)}")
    elif not (isinstance(lr, (int, float)) and lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr={lr!r}: expected a number >= 0 or a tensor of one element")


def check_range(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raise unless ``low <= value < high``."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value < high:
        wanted = f">= {low}" if high == math.inf else f"in [{low}, {high})"
        raise ValueError(f"{name}={value!r}: expected a number {wanted}")


def check_count(name: str, value: Any) -> None:
    """Raise unless a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a positive integer")


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise unless one of the values."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")

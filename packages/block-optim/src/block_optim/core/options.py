"""Checks of options. Each raises ValueError with the option's name, its value and the expectation."""

import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

# Options of torch's optimizers that choose how a step is computed; loading ignores them.
EXECUTION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
# Options of torch's optimizers that change the numbers of a step, and the values that do not.
_NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "amsgrad": (False, None),
    "differentiable": (False, None),
    "capturable": (False, None),
    "maximize": (False, None),
    "decoupled_weight_decay": (True, None),
}


def reject_unsupported(group: Mapping[str, Any], supported: Collection[str]) -> None:
    """Raise ValueError if a group asks for a rule of torch's optimizers that is not among the supported options."""
    for name, values in _NO_CHANGE.items():
        is_set = name in group and name not in supported and group[name] not in values
        if is_set and not (name == "decoupled_weight_decay" and group.get("weight_decay") == 0):
            raise ValueError(f"{name}={group[name]!r}: this optimizer does not support it; leave it out")


def check_execution(foreach: Any, fused: Any, **others: Any) -> None:
    """Raise ValueError unless torch's two ways to compute a step are as torch takes them: None or flags, one True.

    The values of torch's other options must change nothing.
    """
    for name, value in (("foreach", foreach), ("fused", fused)):
        if value is not None:
            check_flag(name, value)
    if foreach and fused:
        raise ValueError("foreach=True with fused=True: choose one")
    reject_unsupported(others, ())


def check_lr(lr: Any) -> float | torch.Tensor:
    """Return ``lr`` as a float, or a tensor of one element as it is; raise ValueError unless it is one, and >= 0."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1 or lr.is_complex():
            raise ValueError(f"lr: expected one number, got a {lr.dtype} tensor of shape {tuple(lr.shape)}")
        return lr
    if not is_number(lr) or not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr={lr!r}: expected a number >= 0 or a tensor of one element")
    return float(lr)


def check_lr_value(lr: float | torch.Tensor) -> None:
    """Raise ValueError if the value in a tensor is one that `check_lr` would refuse. Waits for its device."""
    if isinstance(lr, torch.Tensor) and not lr.is_meta:
        check_lr(lr.item())


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python or NumPy; bools and tensors are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_range(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Raise unless ``low <= value < high``."""
    if not is_number(value) or not low <= value < high:
        wanted = f">= {low}" if high == math.inf else f"in [{low}, {high})"
        hint = "; a tensor may only be lr" if isinstance(value, torch.Tensor) else ""
        raise ValueError(f"{name}={value!r}: expected a number {wanted}{hint}")


def check_betas(betas: Any, below: float = 1) -> None:
    """Raise unless two numbers in [0, 1); the second may also be less than ``below``."""
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise ValueError(f"betas={betas!r}: expected two numbers") from None
    check_range("betas[0]", beta1, 0, 1)
    check_range("betas[1]", beta2, 0, below)


def check_flag(name: str, value: Any) -> None:
    """Raise unless True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected True or False")


def check_count(name: str, value: Any) -> None:
    """Raise unless a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a positive integer")


def check_mesh(name: str, value: Any) -> DeviceMesh | None:
    """Return a mesh in which this rank is, or None; raise TypeError if it is neither, ValueError for other ranks'."""
    if value is None:
        return None
    if not isinstance(value, DeviceMesh):
        raise TypeError(
            f"{name}={value!r}: expected a DeviceMesh; init_device_mesh(device_type, (world_size,)) makes one, "
            "DeviceMesh.from_group(group, device_type) the mesh of a process group"
        )
    if value.get_coordinate() is None:
        raise ValueError(f"{name}: rank {value.get_rank()} is not in {value}; give each rank its own mesh")
    return value


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise unless one of the values."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")

"""Block policies by name: what of a parameter may not be cut.

A block policy is any callable `(name, parameter) -> block or None`, given to `fully_shard(block_policy=...)`. The name
is the parameter's in the module that was passed (after its number in a list of modules); None means single rows.

    rows(32)                                     every parameter in runs of 32 rows
    tiles(128, 128)                              matrices in bands of 128 rows, so that no 128x128 tile is cut
    whole()                                      every matrix on one rank, stacked matrices one by one
    by_pattern({r"experts\\.": Whole(), r".*": Rows(16)})      the first pattern that is found in the name
    declared_by(Muon, AdamW8bit)                 what each optimizer says it needs, the first that says something
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from layout_planner import Block, Elements, Rows, Tile, Whole

BlockPolicy = Callable[[str, torch.Tensor], Block | None]


def rows(count: int) -> BlockPolicy:
    """Runs of `count` rows; a row is one run of the innermost dimension."""
    return partial(_everywhere, Rows(count), 0)


def elements(count: int) -> BlockPolicy:
    """Runs of `count` elements, whatever the shape."""
    return partial(_everywhere, Elements(count), 0)


def tiles(rows: int, columns: int) -> BlockPolicy:
    """Tiles of matrices (the last two dimensions); vectors and scalars are cut anywhere."""
    return partial(_everywhere, Tile(rows, columns), 2)


def _everywhere(block: Block, min_dims: int, name: str, param: torch.Tensor) -> Block | None:
    return block if param.ndim >= min_dims else None


def whole() -> BlockPolicy:
    """Matrices whole, each matrix of a stack on its own; vectors and scalars are cut anywhere."""
    return _whole_matrix


def _whole_matrix(name: str, param: torch.Tensor) -> Block | None:
    if param.ndim < 2:
        return None
    return Whole() if param.ndim == 2 else Tile(param.shape[-2], param.shape[-1])


def by_pattern(table: Mapping[str, Block | BlockPolicy | None]) -> BlockPolicy:
    """The first entry whose regular expression is found in the name (`re.search`); none: single rows.

    Raises ValueError if a key is not a regular expression.
    """
    compiled = []
    for pattern, entry in table.items():
        try:
            compiled.append((re.compile(pattern), entry))
        except re.error as error:
            raise ValueError(f"block policy: {pattern!r} is not a regular expression: {error}") from None
    return partial(_first_found, compiled)


def _first_found(table: list[tuple[re.Pattern[str], Any]], name: str, param: torch.Tensor) -> Block | None:
    entry = next((entry for pattern, entry in table if pattern.search(name)), None)
    block: Block | None = entry(name, param) if callable(entry) else entry
    return block


def declared_by(*optimizers: Any) -> BlockPolicy:
    """The first block that one of several optimizers needs.

    They are classes or objects with a method `block_policy()` that returns a policy (those of `block_optim` have one),
    or policies themselves. Raises TypeError for any other.
    """
    policies: list[BlockPolicy] = []
    for optimizer in optimizers:
        maker = getattr(optimizer, "block_policy", None)
        if maker is None and (isinstance(optimizer, type) or not callable(optimizer)):
            raise TypeError(
                f"{optimizer!r} declares no blocks: it has no method block_policy(), and is not a policy itself"
            )
        policies.append(optimizer if maker is None else maker())
    return partial(_first_named, policies)


def _first_named(policies: list[BlockPolicy], name: str, param: torch.Tensor) -> Block | None:
    return next((block for policy in policies if (block := policy(name, param)) is not None), None)

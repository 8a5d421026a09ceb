"""Packs a group's tensors into equal shards, cutting no block, with the least padding."""

import importlib
from typing import TYPE_CHECKING, Any

from layout_planner._blocks import Block, BlockGrid, Elements, Rows, Tile, Whole, parse_block
from layout_planner._bound import Bound
from layout_planner._layout import Layout
from layout_planner._plan import plan
from layout_planner._segment import Segment
from layout_planner._spec import TensorSpec

if TYPE_CHECKING:
    from layout_planner.checkpoints import read_checkpoint
    from layout_planner.models import (
        GroupShape,
        ModelShape,
        ShapeEntry,
        load_model,
        model_names,
        separate_experts,
    )

__version__ = "0.1.0"
__all__ = [
    "Block",
    "BlockGrid",
    "Bound",
    "Elements",
    "GroupShape",
    "Layout",
    "ModelShape",
    "Rows",
    "Segment",
    "ShapeEntry",
    "TensorSpec",
    "Tile",
    "Whole",
    "load_model",
    "model_names",
    "parse_block",
    "plan",
    "read_checkpoint",
    "separate_experts",
]


def __getattr__(
    name: str,
) -> Any:  # plans need no models: these modules are imported with the first use of a name
    if name == "read_checkpoint":
        return importlib.import_module("layout_planner.checkpoints").read_checkpoint
    if name in __all__:
        return getattr(importlib.import_module("layout_planner.models"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

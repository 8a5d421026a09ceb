"""Packs a group's tensors into equal shards, cutting no block, with the least padding."""

from layout_planner._blocks import Block, BlockGrid, Elements, Rows, Tile, Whole, parse_block
from layout_planner._bound import Bound
from layout_planner._layout import Layout
from layout_planner._plan import plan
from layout_planner._segment import Segment
from layout_planner._spec import TensorSpec
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

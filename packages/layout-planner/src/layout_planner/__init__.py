"""Packs a group's tensors into equal shards, cutting no block, with the least padding."""

from layout_planner._blocks import Block, BlockGrid, Elements, Rows, Tile, Whole, parse_block
from layout_planner._bound import Bound
from layout_planner._layout import Layout, Segment
from layout_planner._plan import plan
from layout_planner._spec import TensorSpec

__version__ = "0.1.0"
__all__ = [
    "Block",
    "BlockGrid",
    "Bound",
    "Elements",
    "Layout",
    "Rows",
    "Segment",
    "TensorSpec",
    "Tile",
    "Whole",
    "parse_block",
    "plan",
]

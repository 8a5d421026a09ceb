"""Packs a group's tensors into equal shards, cutting no block, with the least padding.

`layout_planner.models` has the shapes of whole models, `checkpoints` reads them from safetensors files.
"""

from layout_planner._blocks import Block, BlockGrid, Elements, Rows, Tile, Whole, parse_block
from layout_planner._bound import Bound
from layout_planner._layout import Layout
from layout_planner._plan import plan
from layout_planner._spec import Segment, TensorSpec

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

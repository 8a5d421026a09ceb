"""Encodings of gathers and reductions: a cast, or codes of blocks with scales. `dbuffer` itself imports none of them.

gathers      BlocksOnWire(format)   values are the shard, codes travel
             BlocksAtRest(format)   codes are the shard, and travel
reductions   CastReduction(dtype), BlockReduction(format)   by one all-to-all, summed in fp32
formats      BlockFP8, BlockInt8, BlockNF4
"""

from .formats import BlockFormat, BlockFP8, BlockInt8, BlockNF4
from .gathers import BlocksAtRest, BlocksOnWire, empty_codes
from .noise import Noise
from .reduction import BlockReduction, CastReduction
from .rows import CodeRows
from .tensor import BlockQuantizedTensor
from .tiles import RowRun, RunList, TileGrid

__all__ = [
    "BlockFP8",
    "BlockFormat",
    "BlockInt8",
    "BlockNF4",
    "BlockQuantizedTensor",
    "BlockReduction",
    "BlocksAtRest",
    "BlocksOnWire",
    "CastReduction",
    "CodeRows",
    "Noise",
    "RowRun",
    "RunList",
    "TileGrid",
    "empty_codes",
]

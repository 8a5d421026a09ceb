"""In which encoding values travel: as they are, cast, or as codes of blocks with scales."""

from .block_fp8 import BlockFP8
from .blocks import BlockFormat
from .form import CastOnWire, Encoder, WireForm
from .int8 import BlockInt8
from .nf4 import BlockNF4
from .noise import Noise
from .tiles import RowRun, RunList, TileGrid

__all__ = [
    "BlockFP8",
    "BlockFormat",
    "BlockInt8",
    "BlockNF4",
    "CastOnWire",
    "Encoder",
    "Noise",
    "RowRun",
    "RunList",
    "TileGrid",
    "WireForm",
]

"""In which encoding gathers and reductions travel: as they are, cast, or as codes of blocks with scales."""

from .blocks import BlockFormat
from .codes.at_rest import BlocksAtRest, CodedShard, empty_codes
from .codes.gathered import num_gathered_scales
from .codes.on_wire import BlockEncoder, BlocksOnWire
from .codes.planes import CodePlanes
from .codes.tensor import BlockQuantizedTensor
from .form import Encoder, WireForm
from .formats.fp8 import BlockFP8
from .formats.int8 import BlockInt8
from .formats.nf4 import BlockNF4
from .noise import Noise
from .reduction import BlockReduction, CastReduction, Reducer, ReductionForm
from .tiles import RowRun, RunList, TileGrid

__all__ = [
    "BlockEncoder",
    "BlockFP8",
    "BlockFormat",
    "BlockInt8",
    "BlockNF4",
    "BlockQuantizedTensor",
    "BlockReduction",
    "BlocksAtRest",
    "BlocksOnWire",
    "CastReduction",
    "CodePlanes",
    "CodedShard",
    "Encoder",
    "Noise",
    "Reducer",
    "ReductionForm",
    "RowRun",
    "RunList",
    "TileGrid",
    "WireForm",
    "empty_codes",
    "num_gathered_scales",
]

"""In which encoding gathers and reductions travel: as they are, cast, or as codes of blocks with scales."""

from .at_rest import BlocksAtRest, CodedShard, empty_codes
from .block_fp8 import BlockFP8
from .blocks import BlockFormat
from .form import CastOnWire, Encoder, WireForm
from .gathered_codes import num_gathered_scales
from .int8 import BlockInt8
from .nf4 import BlockNF4
from .noise import Noise
from .planes import CodePlanes
from .quantized import BlockEncoder, BlocksOnWire
from .quantized_tensor import BlockQuantizedTensor
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
    "CastOnWire",
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

"""Weights in and out: files into shards, full tensors out of them, shards in CPU memory for a while.

files, rules            tensors in files, and how names and shapes differ          know: nothing of models
convert                 DCP folders to safetensors and back                      know: files
fp8_files               codes in files, and their scales                           knows: files
targets                 a model's tensors, for loading and for gathering           know: units
loading, full_state     into shards                                                know: files, targets
runs, export            out of shards, in bounded memory                           know: entries
full_params             whole parameters in the modules for a while                knows: runs
offload                 shards in CPU memory                                       knows: units
"""

from .convert import convert_checkpoint
from .export import iter_full_params
from .fp8_files import read_safetensors
from .full_params import full_params
from .full_state import (
    get_full_optimizer_state_dict,
    get_full_state_dict,
    set_full_optimizer_state_dict,
    set_full_state_dict,
)
from .loading import LoadReport, load_safetensors
from .offload import offload, reload
from .rules import Fused, Rename, Split
from .safetensors_export import save_safetensors

__all__ = [
    "Fused",
    "LoadReport",
    "Rename",
    "Split",
    "convert_checkpoint",
    "full_params",
    "get_full_optimizer_state_dict",
    "get_full_state_dict",
    "iter_full_params",
    "load_safetensors",
    "offload",
    "read_safetensors",
    "reload",
    "save_safetensors",
    "set_full_optimizer_state_dict",
    "set_full_state_dict",
]

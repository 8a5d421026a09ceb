"""Weights in and out: files into shards, full tensors out of them, shards in CPU memory for a while.

files, rules            tensors in files, and how names and shapes differ          imports: nothing of models
conversions             rules of transformers' models                              imports: rules
runs                    shards into whole tensors, in bounded memory               imports: files, units
targets                 a model's tensors, for loading and for gathering           imports: runs, units
loading, full_state     files and state dicts into shards                          imports: files, rules, targets
merged, export          a model's whole tensors, and files of them                 imports: files, targets, conversions
convert                 DCP folders to safetensors and back, without a model       imports: files
local_shards            this rank's boxes of every tensor, and who sends which     imports: targets
full_params             whole parameters in the modules for a while                imports: runs, targets
offload                 shards in CPU memory                                       imports: units
"""

from ragged_shard.state_dict import full_state_dict as get_full_state_dict

from .convert import convert_checkpoint
from .export import iter_full_params, save_safetensors
from .files import read_safetensors
from .full_params import full_params
from .full_state import get_full_optimizer_state_dict, set_full_optimizer_state_dict, set_full_state_dict
from .loading import LoadReport, load_safetensors
from .local_shards import LocalShard, local_shards
from .merged import merged_params
from .offload import offload, reload
from .rules import Rule

__all__ = [
    "LoadReport",
    "LocalShard",
    "Rule",
    "convert_checkpoint",
    "full_params",
    "get_full_optimizer_state_dict",
    "get_full_state_dict",
    "iter_full_params",
    "load_safetensors",
    "local_shards",
    "merged_params",
    "offload",
    "read_safetensors",
    "reload",
    "save_safetensors",
    "set_full_optimizer_state_dict",
    "set_full_state_dict",
]

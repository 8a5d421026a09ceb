"""Models to plan, without values: the built-in one, one of transformers, or the tensors of a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_runtime.checkpoint import safetensors_shapes

from ..config import RunConfig
from ..errors import TrainError, one_line
from ..model import Transformer
from ..systems import build_hf_model
from ..trainer import model_config


def find_model(path: str) -> str:
    """The file that describes a model: `path`, or the one in the folder; a ``config.json`` before tensors.

    Raises:
        TrainError: there is none.
    """
    where = Path(path).expanduser()
    config = where / "config.json"
    if where.is_dir() and not config.is_file():
        files = sorted(where.glob("*.safetensors.index.json")) or sorted(where.glob("*.safetensors"))
        if len(files) == 1:
            return str(files[0])
        raise TrainError(
            f"--model {path}: no config.json, and {len(files)} safetensors files or indices; name one"
        )
    return str(config if where.is_dir() else where)


def has_forward(config: RunConfig) -> bool:
    """True if the planned model runs, so that its activations are known; a checkpoint is tensors alone."""
    return not (config.hf_config or "").endswith((".safetensors", ".safetensors.index.json"))


def build_planned(config: RunConfig, vocab_size: int) -> nn.Module:
    """The whole model in the default dtype. Call it where tensors are made on meta or are fake.

    Raises:
        TrainError: the file cannot be read, or has no model.
    """
    if config.hf_config is None:
        return Transformer(model_config(config, vocab_size), checkpointing=config.checkpointing)
    if has_forward(config):
        model = build_hf_model(
            config.hf_config, config.seed, vocab_size, config.checkpointing, torch.get_default_dtype()
        )
        _mask_as_in_a_run(model)
        return model
    try:
        return _Tensors(safetensors_shapes(config.hf_config))
    except (ValueError, OSError, ImportError) as error:
        raise TrainError(f"--model {one_line(error)}") from error


def _mask_as_in_a_run(model: Any) -> None:
    """Without masks where torch's causal attention needs none: of fake tensors transformers cannot see that."""
    import transformers
    from transformers import masking_utils

    if model.config._attn_implementation != "sdpa":
        return

    def mask(*args: Any, **options: Any) -> Any:
        return masking_utils.sdpa_mask(*args, **{**options, "allow_is_causal_skip": True})

    attention = transformers.AttentionInterface()["sdpa"]
    transformers.AttentionInterface.register("sdpa_planned", attention)
    transformers.AttentionMaskInterface.register("sdpa_planned", mask)
    model.set_attn_implementation("sdpa_planned")


class _Layer(nn.Module):
    """A unit: what has the same number in its name."""


class _Tensors(nn.Module):
    """Parameters with a checkpoint's names and shapes, in modules of the same names, which have no forward."""

    _no_split_modules = (_Layer.__name__,)

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            layer = next((n for n, part in enumerate(path) if part.isdecimal()), None)
            parent: nn.Module = self
            for depth, part in enumerate(path):
                if not hasattr(parent, part):
                    kind = _Layer if depth == layer else nn.Module
                    parent.add_module(part, kind())
                parent = parent.get_submodule(part)
            parent.register_parameter(last, nn.Parameter(torch.empty(shape)))

"""A transformers model from a configuration file, with random values. Needs the extra ``hf``."""

import importlib.util
import json
from pathlib import Path

import torch
from torch import nn

from .errors import TrainError


def build_hf_model(path: str, seed: int, vocab_size: int, checkpointing: bool) -> nn.Module:
    """The causal language model that a ``config.json`` describes, the same on every rank.

    Raises:
        TrainError: transformers is missing, the file is not such a configuration, or its vocabulary is too small.
    """
    if importlib.util.find_spec("transformers") is None:
        raise TrainError("--hf-config needs transformers: pip install 'fsdp-runtime[hf]'")
    import transformers

    try:
        settings = json.loads(Path(path).read_text())
        kind = settings.pop("model_type")
        config = transformers.AutoConfig.for_model(kind, **settings)
        torch.manual_seed(seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except KeyError as error:
        raise TrainError(f"--hf-config {path}: no {error} in it") from error
    except Exception as error:  # transformers checks little: whatever a wrong value leads to
        raise TrainError(f"--hf-config {path}: {' '.join(str(error).split())[:300]}") from error
    if config.vocab_size < vocab_size:
        raise TrainError(
            f"--hf-config {path}: a vocabulary of {config.vocab_size}, the data has {vocab_size} tokens"
        )
    model.config.use_cache = False  # type: ignore[union-attr, unused-ignore]
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator, unused-ignore]
    return model

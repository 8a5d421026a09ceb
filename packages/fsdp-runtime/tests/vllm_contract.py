"""The classes of vLLM 0.33.0 that its trainer's side takes, as its `weight_transfer` documents them.

From `vllm/distributed/weight_transfer/base.py`, for machines without vLLM.
"""

import importlib.util
import sys
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any
from unittest import mock

import torch

FOLDER = "vllm.distributed.weight_transfer"


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None


class WeightSource(ABC):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        assert isinstance(cls.__dict__.get("metadata"), cached_property)

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank):
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def implements_iter_full(self):
        return type(self).iter_full is not WeightSource.iter_full

    def implements_iter_local(self):
        return type(self).iter_local is not WeightSource.iter_local

    def iter_full(self):
        raise NotImplementedError

    def iter_local(self):
        raise NotImplementedError


class TrainerWeightTransferEngine:
    def __init__(self, config, *, client, source, is_sender=True):
        self.config, self.client, self.source, self.is_sender = config, client, source, is_sender


class WeightTransferEngine:
    update_info_cls: Any
    receive_weights: Any

    def __init__(self, config, vllm_config, device, model):
        self.parallel_config, self.device, self.model = vllm_config.parallel_config, device, model

    def update_weights(self, update_info):
        self.receive_weights(self.update_info_cls(**update_info))


@contextmanager
def interface():
    """Inside, imports of vLLM find it, or modules with the classes of this file where it is not installed."""
    modules: dict[str, Any] = {}
    if importlib.util.find_spec("vllm") is None:
        base = f"{FOLDER}.base"
        modules = {name: ModuleType(name) for name in ("vllm", "vllm.distributed", FOLDER, base)}
        classes = (ParamMeta, WeightSource, TrainerWeightTransferEngine, WeightTransferEngine)
        modules[base].__dict__.update({each.__name__: each for each in classes})
    with mock.patch.dict(sys.modules, modules):
        yield

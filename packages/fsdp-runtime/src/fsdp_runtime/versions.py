"""What is installed, and must be the same on all ranks: layouts, messages and checkpoints are made by it."""

import functools
import importlib.metadata
import platform
from collections.abc import Mapping
from types import MappingProxyType

_PACKAGES = ("torch", "layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime")


def version(name: str) -> str:
    """A package's version, or "not installed"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def versions() -> Mapping[str, str]:
    """The versions of torch, these five packages and Python, by what an error calls them."""
    found = {f"the version of {name}": version(name) for name in _PACKAGES}
    return MappingProxyType({**found, "the version of Python": ".".join(platform.python_version_tuple()[:2])})

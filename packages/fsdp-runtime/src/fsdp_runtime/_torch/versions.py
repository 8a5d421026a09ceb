"""What is installed, and must be the same on all ranks: layouts, messages and checkpoints are made by it."""

import importlib.metadata
import platform
from collections.abc import Mapping

_PACKAGES = ("torch", "layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime")


def installed_versions(*more: str) -> Mapping[str, str]:
    """The versions of torch, of these five packages, of `more` packages and of Python: {"the version of torch": ...}.

    What `fully_shard` compares between ranks. Communicates nothing. Of a package that is missing: "not installed".
    """
    found = {f"the version of {name}": _version(name) for name in (*_PACKAGES, *more)}
    return {**found, "the version of Python": ".".join(platform.python_version_tuple()[:2])}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

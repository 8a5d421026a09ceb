"""The package installs, and exports nothing before it is built."""

from importlib import metadata

import fsdp_runtime


def test_the_installed_version_is_the_modules():
    assert metadata.version("fsdp-runtime") == fsdp_runtime.__version__


def test_nothing_is_exported_yet():
    assert fsdp_runtime.__all__ == []

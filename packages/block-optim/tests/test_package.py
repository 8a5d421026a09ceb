"""The package installs, and exports nothing before it is built."""

from importlib import metadata

import block_optim


def test_the_installed_version_is_the_modules():
    assert metadata.version("block-optim") == block_optim.__version__


def test_nothing_is_exported_yet():
    assert block_optim.__all__ == []

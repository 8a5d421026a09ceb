"""The package installs, and what it exports is there."""

from importlib import metadata

import block_optim


def test_the_installed_version_is_the_modules():
    assert metadata.version("block-optim") == block_optim.__version__


def test_every_exported_name_is_there_and_documented():
    for name in block_optim.__all__:
        assert getattr(block_optim, name).__doc__, name

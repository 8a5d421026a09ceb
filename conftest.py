"""Lets pytest read the settings of its time-out plug-in where it is not installed, as on GPU machines."""

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the plug-in's setting, which --strict-config refuses as unknown without it."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take; needs pytest-timeout")

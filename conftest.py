"""Settings of the whole repository's tests: which cases `./run tests` leaves to `./run tests_full`."""

import gc
import math
from collections import defaultdict

import pytest

_RANKS = ("ranks", "world_size", "mesh_shape")  # parameters that give a test's number of ranks
_USUAL = 3  # nothing divides evenly; meshes of two axes have 4


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the setting of the time-out plug-in, which --strict-config refuses where it is not installed."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take; needs pytest-timeout")


def pytest_collection_finish() -> None:
    """Take what has been imported, torch above all, out of every later garbage collection: each takes 0.1 s less."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let an exit collect it: nanobind reports all else as leaked."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `long` the cases of a test that differ from another one in the number of ranks only: 3 ranks stay."""
    cases: dict[tuple[object, ...], list[tuple[int, pytest.Item]]] = defaultdict(list)
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        name = next((name for name in _RANKS if isinstance(params.get(name), int | tuple)), None)
        if name is not None:
            shape = params[name] if isinstance(params[name], tuple) else (params[name],)
            others = tuple(sorted((key, id(value)) for key, value in params.items() if key != name))
            key = (item.parent, getattr(item, "originalname", ""), len(shape), others)
            cases[key].append((abs(math.prod(shape) - _USUAL - len(shape) + 1), item))
    for same in cases.values():
        kept = min(same, key=lambda case: case[0])[1]
        for _, item in same:
            if item is not kept:
                item.add_marker(pytest.mark.long)

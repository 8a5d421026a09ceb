"""Settings of the whole repository's tests: which cases `./run tests` leaves to `./run tests_full`."""

from collections import defaultdict

import pytest

_RANKS = ("ranks", "world_size")  # parameters that give a test's number of ranks
_USUAL = 3  # nothing divides evenly


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the setting of the time-out plug-in, which --strict-config refuses where it is not installed."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take; needs pytest-timeout")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `long` the cases of a test that differ from another one in the number of ranks only: 3 ranks stay."""
    cases: dict[tuple[object, ...], list[tuple[int, pytest.Item]]] = defaultdict(list)
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None:
            continue
        name = next((name for name in _RANKS if isinstance(call.params.get(name), int)), None)
        if name is not None:
            others = tuple(sorted((key, index) for key, index in call.indices.items() if key != name))
            cases[item.parent, getattr(item, "originalname", ""), others].append((call.params[name], item))
    for same in cases.values():
        kept = min(same, key=lambda case: (abs(case[0] - _USUAL), case[0]))
        for case in same:
            if case is not kept:
                case[1].add_marker(pytest.mark.long)

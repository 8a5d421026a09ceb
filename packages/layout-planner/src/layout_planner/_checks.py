"""Checks of arguments, shared by everything that takes one from a user."""

from collections.abc import Iterable

MOST_RANKS = 1 << 20  # anything above is a typing error, and would take memory in proportion


def shortened(text: object) -> str:
    """A message that quotes the input, cut to a few hundred characters."""
    shown = str(text)
    return shown if len(shown) <= 600 else f"{shown[:300]} ... {shown[-300:]}"


def check_integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return an integer of at least `least` and at most `most`; ValueError, with its name, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name} is {value!r}; expected an integer of at most {most}")
    return value


def check_integers(name: str, values: Iterable[object], least: int) -> None:
    """Raise ValueError unless all of them are integers of at least `least`; the message names the argument."""
    for value in values:
        if type(value) is not int or value < least:
            check_integer(name, value, least)


def check_world_size(value: object) -> int:
    """Return `value` if it is a number of ranks, from 1 to `MOST_RANKS`; else raise ValueError."""
    return check_integer("world_size", value, 1, MOST_RANKS)

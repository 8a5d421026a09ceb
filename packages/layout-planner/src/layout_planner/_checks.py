"""Checks of arguments, shared by everything that takes one from a user."""


def check_integer(name: str, value: object, least: int) -> int:
    """Return `value` if it is an integer of at least `least`.

    Raises:
        ValueError: it is anything else (a bool, a float, too small); the message names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
    return value

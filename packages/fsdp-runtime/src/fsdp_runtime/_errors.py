"""Errors of wrong calls."""


class WrongCallError(ValueError, AssertionError):
    """A wrong argument for which FSDP2 raises AssertionError: scripts that catch either type go on."""

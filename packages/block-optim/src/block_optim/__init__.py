"""Optimizers that work on whole blocks of sharded parameters.

Not built yet: nothing is exported.
"""

__version__ = "0.0.0"
__all__: list[str] = []

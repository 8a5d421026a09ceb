"""One flat buffer per group of parameters: views instead of copies, collectives in place.

Not built yet: nothing is exported.
"""

__version__ = "0.0.0"
__all__: list[str] = []

"""RaggedShard: a DTensor placement in which each rank holds a contiguous run of whole blocks.

Not built yet: nothing is exported.
"""

__version__ = "0.0.0"
__all__: list[str] = []

"""fully_shard, a drop-in for FSDP2's, that respects the structure of the model.

Not built yet: nothing is exported.
"""

__version__ = "0.0.0"
__all__: list[str] = []

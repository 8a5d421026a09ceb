"""Packs a group's tensors into equal shards, cutting no block, with the least padding."""

__version__ = "0.1.0"

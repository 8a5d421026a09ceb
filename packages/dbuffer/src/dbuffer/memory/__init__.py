"""The memory of a buffer: where tensors lie in it, this rank's shard, the gathered storage and its views.

Knows layouts and the device layer; nothing of ranks that talk to each other.
"""

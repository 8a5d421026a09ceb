"""Clipping, optimizers in backward, and the check for stale parameters."""

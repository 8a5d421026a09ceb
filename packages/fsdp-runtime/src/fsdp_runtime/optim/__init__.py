"""Clipping, and the check for stale parameters."""

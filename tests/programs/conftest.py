"""Ranks of programs share what they import."""

from ragged_shard.testing import preload

preload("fsdp_runtime", "tests.programs.runs")

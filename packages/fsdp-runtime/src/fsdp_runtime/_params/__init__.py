"""Sharded and gathered parameters: a group of one dtype, a unit of groups."""

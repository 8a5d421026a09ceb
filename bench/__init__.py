"""Benchmarks of the workspace, for airspeed velocity. See README.md in this folder."""

"""Imported by asv alone, which imports every file of this folder: its fork server has torch then, and each of some
three hundred benchmark processes starts in a tenth of a second instead of three."""

import torch  # noqa: F401

"""Imported by asv alone, which imports every file of this folder: its fork server has torch then, and no benchmark's
process needs to import it."""

import torch  # noqa: F401

"""Puts this folder and the training helpers on the path: tests import them by name."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

# The damaged files are made with both.
collect_ignore = [] if find_spec("safetensors") and find_spec("hypothesis") else ["test_fuzz.py"]

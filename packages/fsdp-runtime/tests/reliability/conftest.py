"""Puts this folder and the training helpers on the path: tests import them by name."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = [] if find_spec("safetensors") else ["test_fuzz.py"]  # which damages its files

"""Puts this folder and the one above on the path: test modules and the ranks that they start import from both."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

"""Puts this folder on the path: test modules and the ranks that they start import its helpers by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""Lets tests, and the ranks they start, import the helpers beside them by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

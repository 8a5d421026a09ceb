"""Writes packages/fsdp-runtime/CONFORMANCE.md from the cases."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from conformance_registry import table

TABLE = Path(__file__).parents[2] / "CONFORMANCE.md"

if __name__ == "__main__":
    TABLE.write_text(table())

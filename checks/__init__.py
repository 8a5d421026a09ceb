"""Long checks, which `nox -s "nightly(NAME)"` or `python -m checks.NAME` run, and the pages that some of them write."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / "packages" / "fsdp-runtime"
# fsdp-runtime's tests import their helpers by name.
sys.path[:0] = [str(RUNTIME / "tests" / name) for name in ("train", "conformance", "parity", "parallel", "")]

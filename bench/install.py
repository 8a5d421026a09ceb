"""Install every package that a checkout has into the running interpreter, for asv: `install.py CHECKOUT`.

One pip call without dependencies: torch and the build backend come from asv's matrix. Old commits have fewer
packages, new ones more; whatever is there is installed.
"""

import subprocess
import sys
from pathlib import Path


def main(checkout: str) -> int:
    packages = sorted(str(path.parent) for path in Path(checkout).glob("packages/*/pyproject.toml"))
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--force-reinstall"]
    return subprocess.run([*pip, *packages], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

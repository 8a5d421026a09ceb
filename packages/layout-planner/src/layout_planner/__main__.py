"""`layout-planner` and `python -m layout_planner`."""

import sys

from layout_planner._cli import main

if __name__ == "__main__":
    sys.exit(main())

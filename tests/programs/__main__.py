"""The command: see `search`."""

from .search import main

if __name__ == "__main__":
    main()

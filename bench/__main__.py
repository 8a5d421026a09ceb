"""`python -m bench COMMAND ...`: see README.md in this folder for what each command does."""

import sys

from .commands import COMMANDS, run


def main(arguments: list[str]) -> int:
    """Hand the rest of the line to the command's module."""
    if not arguments or arguments[0] not in COMMANDS:
        width = max(map(len, COMMANDS))
        print("python -m bench COMMAND [--help]\n")
        print("\n".join(f"  {command:{width}}  {what}" for command, (_, what) in COMMANDS.items()))
        return 0 if arguments[:1] in ([], ["--help"], ["-h"]) else 2
    return run(arguments[0], arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

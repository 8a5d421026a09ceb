"""The package's README, from the tree or, outside it, from the installed wheel."""

from importlib import metadata
from pathlib import Path


def readme():
    path = Path(__file__).parent.parent / "README.md"
    return path.read_text() if path.is_file() else metadata.metadata("block-optim").get_payload()

"""Sections of pages of fsdp-runtime, each between its markers and written by one command."""

import platform
import re
from datetime import date
from pathlib import Path

import torch

from checks import RUNTIME

PAGE = RUNTIME / "docs" / "RELIABILITY.md"


def write_section(name: str, text: str, path: Path = PAGE) -> None:
    """Put `text` between `<!-- name -->` and `<!-- /name -->` of a page, with the date and the versions."""
    page = path.read_text()
    stamp = f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}."
    whole = f"<!-- {name} -->\n{text}\n\n{stamp}\n<!-- /{name} -->"
    changed, found = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: whole, page, flags=re.DOTALL)
    assert found == 1, f"{path} has no section {name}"
    path.write_text(changed)

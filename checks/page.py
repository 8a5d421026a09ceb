"""Sections of docs/RELIABILITY.md, each between markers of its own and written by one command."""

import platform
import re
from datetime import date

import torch

from checks import RUNTIME

PAGE = RUNTIME / "docs" / "RELIABILITY.md"


def write_section(name: str, text: str) -> None:
    """Put `text` between `<!-- name -->` and `<!-- /name -->`, with the date and the versions."""
    page = PAGE.read_text()
    stamp = f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}."
    whole = f"<!-- {name} -->\n{text}\n\n{stamp}\n<!-- /{name} -->"
    changed, found = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: whole, page, flags=re.DOTALL)
    assert found == 1, f"{PAGE} has no section {name}"
    PAGE.write_text(changed)

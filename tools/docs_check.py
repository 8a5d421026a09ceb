"""Check that built pages load nothing from elsewhere: `docs_check.py site`. `mkdocs build --strict` checks links."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

# Attributes that make a browser fetch something without a click.
LOADING = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("use", "href"),
}
# A `link` that is only a statement about the page.
STATED = {"canonical", "prev", "next", "alternate"}
_REMOTE = re.compile(r"(?:https?:)?//")
_CSS = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "link" and dict(attrs).get("rel") in STATED:
            return
        for name, value in attrs:
            if (tag, name) in LOADING and value and _REMOTE.match(value):
                self.remote.append(f"<{tag} {name}={value}>")


def remote_assets(folder: Path) -> list[str]:
    """What pages and style sheets under a folder load from other hosts, each with its file."""
    assets = []
    for path in sorted(folder.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        assets += [f"{path.relative_to(folder)}: {item}" for item in page.remote]
    for path in sorted(folder.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        assets += [f"{path.relative_to(folder)}: {url}" for url in _CSS.findall(text)]
    return assets


def main(arguments: list[str]) -> int:
    """Print what is loaded from elsewhere; 1 if there is any, or no page at all."""
    folder = Path(arguments[0])
    if not any(folder.rglob("*.html")):
        print(f"{folder} has no pages")
        return 1
    problems = remote_assets(folder)
    print("\n".join(problems) or f"{folder}: nothing is loaded from elsewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

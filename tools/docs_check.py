"""Check that built pages load nothing from elsewhere and that links lead somewhere: `docs_check.py site`."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

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
_ELSEWHERE = re.compile(r"[a-z]+:|/")  # another host, mail, or a path from the host's root
_REMOTE = re.compile(r"(?:https?:)?//")
_CSS = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []
        self.links: list[str] = []
        self.anchors = {"", "__top"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors.add(attributes.get("id") or "")
        if tag == "a" and (link := attributes.get("href")):
            self.links.append(link)
        if tag == "link" and attributes.get("rel") in STATED:
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


def dead_links(folder: Path) -> list[str]:
    """Links between pages under a folder to pages, files or anchors that are not there, each with its file."""
    pages = {}
    for path in sorted(folder.resolve().rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    links = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if _ELSEWHERE.match(link):
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or (there in pages and unquote(anchor) not in pages[there].anchors):
                links.append(f"{path.relative_to(folder.resolve())}: {link} leads nowhere")
    return links


def main(arguments: list[str]) -> int:
    """Print what is loaded from elsewhere and what leads nowhere; 1 if there is any, or no page at all."""
    folder = Path(arguments[0])
    if not any(folder.rglob("*.html")):
        print(f"{folder} has no pages")
        return 1
    problems = remote_assets(folder) + dead_links(folder)
    print(
        "\n".join(problems) or f"{folder}: nothing is loaded from elsewhere, and every link leads somewhere"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

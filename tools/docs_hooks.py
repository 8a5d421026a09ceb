"""Hooks of mkdocs: pages of the packages join those of docs/, and links between files become links between pages.

Links in all pages are those of the checkout, so that they work there too. What the site has no page for (sources,
tests, folders) is named in the page without a link. `llms.txt` lists all pages for language models.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Where pages and pictures outside docs/ appear, by their path in the repository.
SINGLE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "bench/results/REPORT.md": "benchmarks.md",
    "packages/fsdp-runtime/CONFORMANCE.md": "fsdp-runtime/conformance.md",
    "packages/fsdp-runtime/src/fsdp_runtime/train/README.md": "fsdp-runtime/train.md",
}
# Code, in which nothing is a link, or a link, in whose text there may be code: the one that begins first.
_CODE_OR_LINK = re.compile(
    r"^```.*?^```$|^    [^\n]*$|`[^`\n]*`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


# What makes a browser fetch something without a click; a `link` to another page does not.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|use)\b[^>]*?\s(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|prev|next|alternate))[^>]*?\shref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')\s]+)"""
)
_listed: dict[str, str] = {}  # lines of llms.txt by path in the site


def pages() -> dict[str, str]:
    """Path in the site by path in the repository, of all that docs/ does not hold."""
    pages = dict(SINGLE)
    for path in sorted(ROOT.glob("packages/*/docs/*")):
        package = path.parts[-3]
        if path.suffix in (".md", ".svg", ".png"):
            pages[path.relative_to(ROOT).as_posix()] = f"{package}/{path.name.lower()}"
    return pages


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures of the packages."""
    from mkdocs.structure.files import File  # here, so that the rest can be tested without mkdocs

    for source, target in pages().items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at pages of the site."""
    known = pages()
    back = {target: source for source, target in known.items()}
    here = page.file.src_uri
    _listed[here] = line_of(page.file.url, markdown)
    if here == "troubleshooting.md":  # who searches an error's text wants its entry
        page.meta["search"] = {"boost": 10}
    return relink(markdown, back.get(here, f"docs/{here}"), here, known)


def on_post_build(config: Any) -> None:
    """Write `llms.txt` into the site. Raises mkdocs' PluginError if a page loads anything from elsewhere."""
    head = f"# {config.site_name}\n\n> {config.site_description}\n\n## Pages\n\n"
    (Path(config.site_dir) / "llms.txt").write_text(head + "".join(_listed[key] for key in sorted(_listed)))
    if remote := remote_assets(Path(config.site_dir)):
        from mkdocs.exceptions import PluginError

        raise PluginError("pages load from other hosts: " + "; ".join(remote))


def remote_assets(folder: Path) -> list[str]:
    """Addresses on other hosts that pages and style sheets in a folder load, each with its file."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".html", ".css"))
    return [
        f"{path.relative_to(folder)}: {''.join(match.groups(''))}"
        for path in paths
        for match in _LOADED.finditer(path.read_text(encoding="utf-8"))
    ]


def line_of(url: str, markdown: str) -> str:
    """A page's line in `llms.txt`: title, address in the site, and the first sentence of its text."""
    prose = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    title = re.search(r"^# (.+)$", prose, re.MULTILINE)
    text = re.search(r"^(?:[\w`*\"\[(]).+(?:\n\S.*)*", prose, re.MULTILINE)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text[0].replace("\n", " ")) if text else ""
    sentence = plain.split(". ")[0].rstrip(".:") + "."
    return f"- [{title[1] if title else url}]({url}): {sentence}\n"


def relink(markdown: str, source: str, here: str, known: dict[str, str]) -> str:
    """A page's text with links between files of the checkout made links between pages of the site.

    Args:
        markdown: the text.
        source: the page's path in the repository.
        here: its path in the site.
        known: paths in the site by paths in the repository, of what docs/ does not hold.
    """

    def replaced(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if target is None:  # code
            return match[0]
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if wanted.startswith("docs/"):
            inside = wanted.removeprefix("docs/")
        elif wanted in known:
            inside = known[wanted]
        elif (ROOT / wanted).exists():
            return text
        else:
            return match[0]  # mkdocs says that it leads nowhere
        return f"{mark}[{text}]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}{hash_}{anchor})"

    return _CODE_OR_LINK.sub(replaced, markdown)

"""Release one package: version, dated changelog, build, check, commit, tag.

    python tools/release.py PACKAGE [VERSION] [--dry-run]

The newest section of the package's CHANGELOG.md says what is released. Its heading is `## Unreleased`, or already the
version, and gets the version and the date. Without VERSION: what the heading says, else `__version__` while that has
neither a tag nor an older section, else the next patch version. Nothing is pushed or uploaded.
"""

import argparse
import datetime
import difflib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parent.parent
VERSION_LINE = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
HEADING = re.compile(r"^## (\S+)(?: \((.+)\))?$", re.MULTILINE)


class RefusedError(Exception):
    """The release cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Release:
    """What a release changes: the package's folder, its new version and tag, and the new text of each file."""

    folder: Path
    version: str
    tag: str
    texts: dict[Path, str]


def git(root: Path, *arguments: str) -> str:
    """Run git in the checkout; its output without the last line break.

    Raises:
        RefusedError: git failed; with what it said.
    """
    found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RefusedError(f"git {' '.join(arguments)}: {found.stderr.strip()}")
    return found.stdout.rstrip("\n")


def matched(pattern: re.Pattern[str], path: Path) -> re.Match[str]:
    """The first match of a pattern in a file."""
    if found := pattern.search(path.read_text()):
        return found
    raise RefusedError(f"{path}: nothing matches {pattern.pattern!r}")


def tagged_versions(root: Path, package: str) -> list[Version]:
    """The versions of a package that have a tag, oldest first."""
    prefix = f"{package}-v"
    return sorted(
        Version(tag.removeprefix(prefix)) for tag in git(root, "tag", "--list", prefix + "*").split()
    )


def choose_version(heading: str, current: str, released: list[Version], wanted: str | None) -> str:
    """The version to release: what was asked for, what the changelog's heading says, or the next free one.

    Raises:
        RefusedError: no version, another one than the heading's, one that was released, or one below such a one.
    """
    newest = Version(current)
    following = ".".join(map(str, (*newest.release[:2], newest.micro + 1)))
    free = current if newest not in released else following
    version = wanted or (free if heading == "Unreleased" else heading)
    try:
        chosen = Version(version)
    except InvalidVersion:
        raise RefusedError(f"{version!r} is not a version; expected one like {following}") from None
    if heading not in ("Unreleased", version):
        raise RefusedError(
            f"the newest section of the changelog is {heading}, not {version}; rename it or leave VERSION out"
        )
    if chosen in released:
        raise RefusedError(f"{version} has a tag or a section already; the next free version is {following}")
    if released and chosen < max(released):
        raise RefusedError(f"{version} is below {max(released)}, the newest release")
    return version


def check_siblings(root: Path, package: str, version: str) -> None:
    """Refuse a version that another package of the workspace does not accept."""
    for path in sorted((root / "packages").glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        groups = [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
        for line in (line for group in groups for line in group):
            needed = Requirement(line)
            if needed.name == package and not needed.specifier.contains(version, prereleases=True):
                raise RefusedError(
                    f"{path.relative_to(root)} asks for {line}, which leaves out {version}; widen it first"
                )


def plan(root: Path, package: str, wanted: str | None, today: datetime.date) -> Release:
    """Work out a release without changing anything.

    Raises:
        RefusedError: unknown package, dirty tree, nothing new in the changelog, or a version that cannot be used.
    """
    packages = sorted(path.parent.name for path in (root / "packages").glob("*/pyproject.toml"))
    if package not in packages:
        raise RefusedError(f"no package {package!r}; expected one of {', '.join(packages)}")
    if changed := git(root, "status", "--porcelain"):
        raise RefusedError(f"the tree has uncommitted changes; commit or stash them first:\n{changed}")
    folder = root / "packages" / package
    changelog, init = folder / "CHANGELOG.md", folder / "src" / package.replace("-", "_") / "__init__.py"
    heading, current = matched(HEADING, changelog), matched(VERSION_LINE, init)
    text = changelog.read_text()
    if heading[2]:
        raise RefusedError(
            f"{changelog.relative_to(root)} has nothing new: its newest section is {heading[0][3:]}"
        )
    if not re.split(r"^## ", text[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip():
        raise RefusedError(
            f"{changelog.relative_to(root)}: section {heading[1]} is empty; say what has changed"
        )
    older = [Version(found[1]) for found in HEADING.finditer(text, heading.end())]
    version = choose_version(heading[1], current[1], older + tagged_versions(root, package), wanted)
    check_siblings(root, package, version)
    texts = {
        init: VERSION_LINE.sub(f'__version__ = "{version}"', init.read_text(), count=1),
        changelog: text[: heading.start()] + f"## {version} ({today.isoformat()})" + text[heading.end() :],
    }
    return Release(folder, version, f"{package}-v{version}", texts)


def describe(root: Path, release: Release) -> str:
    """The changes of a release as a diff."""
    lines: list[str] = []
    for path, text in release.texts.items():
        name = str(path.relative_to(root))
        old, new = path.read_text().splitlines(keepends=True), text.splitlines(keepends=True)
        lines += difflib.unified_diff(old, new, name, name, n=1)
    return f"{release.tag}\n{''.join(lines)}"


def build_and_check(root: Path, release: Release) -> None:
    """Build sdist and wheel into dist/ and check their metadata."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", str(release.folder)]
    subprocess.run(build, cwd=root, check=True)
    stem = f"{release.folder.name.replace('-', '_')}-{release.version}"
    files = sorted(str(path) for path in (root / "dist").glob(f"{stem}[-.]*"))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], cwd=root, check=True)


def carry_out(root: Path, release: Release, build: Callable[[Path, Release], None]) -> None:
    """Change the files, build, commit and tag; restore the files when the build or the commit fails."""
    before = {path: path.read_text() for path in release.texts}
    for path, text in release.texts.items():
        path.write_text(text)
    message = f"{release.folder.name} {release.version}"
    try:
        build(root, release)
        git(root, "commit", "--quiet", "--message", message, "--", *map(str, release.texts))
    except BaseException:
        for path, text in before.items():
            path.write_text(text)
        raise
    git(root, "tag", "--annotate", release.tag, "--message", message)


def main(
    arguments: list[str],
    root: Path = ROOT,
    today: datetime.date | None = None,
    build: Callable[[Path, Release], None] = build_and_check,
) -> int:
    """Release a package; 1, with the reason, where that is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("package", help="the package's name, as its folder below packages/")
    parser.add_argument(
        "version", nargs="?", help="its new version; by default worked out from the changelog"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, change nothing")
    options = parser.parse_args(arguments)
    try:
        release = plan(root, options.package, options.version, today or datetime.date.today())
        print(describe(root, release))
        if options.dry_run:
            print("dry run: nothing was changed")
            return 0
        carry_out(root, release, build)
    except RefusedError as error:
        print(f"not released: {error}", file=sys.stderr)
        return 1
    print(f"committed and tagged. Next: git push --atomic origin HEAD {release.tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

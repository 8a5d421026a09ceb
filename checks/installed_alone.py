"""Check an installed package from inside its own environment: no undeclared sibling, every module imports.

A module may need what one of the package's own extras installs, and nothing else.

    python installed_alone.py PACKAGE SIBLING [SIBLING ...]

Runs before any test requirement is installed, so whatever is there was declared.
"""

import importlib
import pkgutil
import re
import sys
from importlib import metadata


def name_of(requirement: str) -> str:
    """The distribution that a requirement asks for."""
    found = re.match(r"[\w.-]+", requirement)
    assert found, f"{requirement!r} is not a requirement"
    return found[0]


def declared(package: str) -> set[str]:
    """The names of all distributions that `package` needs without extras, itself included."""
    found, waiting = set(), [package]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # left out by a marker: another platform's
            continue
        waiting += [name_of(line) for line in requirements if "extra ==" not in line]
    return found


def optional(package: str) -> set[str]:
    """The names of what the package's extras install."""
    lines = [line for line in metadata.requires(package) or [] if "extra ==" in line]
    return {name_of(line).lower().replace("-", "_") for line in lines}


def needs_an_extra(module: str, package: str) -> bool:
    """Import a module; return whether it needs something that only an extra of the package installs."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in optional(package):
            raise
        return True
    return False


def main(package: str, siblings: list[str]) -> None:
    """Exit with a message where the environment or an import is not as declared."""
    present = {re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower() for found in metadata.distributions()}
    if strangers := sorted((present & set(siblings)) - declared(package)):
        sys.exit(f"{package} is installed alone, yet {', '.join(strangers)} came along undeclared")
    root = importlib.import_module(package.replace("-", "_"))
    names = [found.name for found in pkgutil.walk_packages(root.__path__, root.__name__ + ".")]
    names = [name for name in names if not name.endswith("__main__")]
    extra = [name for name in names if needs_an_extra(name, package)]
    if "site-packages" not in str(root.__file__):
        sys.exit(f"{package} was imported from {root.__file__}, not from its wheel")
    said = f", {', '.join(extra)} only with an extra" if extra else ""
    print(f"{package} {metadata.version(package)}: alone, and its {len(names) + 1} modules import{said}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

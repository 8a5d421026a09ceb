"""What `./run release` does to a checkout, and what it refuses."""

import datetime
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools import release

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="a release needs git")

TODAY = datetime.date(2030, 1, 2)


def git(root, *arguments):
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.com"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout


def commit(root, message="a change"):
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Two packages, `inner` 0.3.0 and `outer-one`, which needs it; no tags yet."""
    for key in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{key}_NAME", "Somebody")
        monkeypatch.setenv(f"GIT_{key}_EMAIL", "somebody@example.com")
    for name, needs in (("inner", []), ("outer-one", ["inner>=0.3,<0.4"])):
        source = tmp_path / "packages" / name / "src" / name.replace("-", "_")
        source.mkdir(parents=True)
        (source / "__init__.py").write_text(f'"""{name}."""\n\n__version__ = "0.3.0"\n__all__ = []\n')
        folder = source.parent.parent
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\ndependencies = {needs}\n')
        (folder / "CHANGELOG.md").write_text(f"# Changelog of {name}\n\n## Unreleased\n\n- Something new.\n")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path)
    return tmp_path


def run(root, *arguments):
    built = []
    status = release.main(
        list(arguments), root=root, today=TODAY, build=lambda root, release: built.append(release.tag)
    )
    return status, built


def changelog(root, package="inner"):
    return root / "packages" / package / "CHANGELOG.md"


def init(root, package="inner"):
    return root / "packages" / package / "src" / package.replace("-", "_") / "__init__.py"


def add_entry(root):
    text = changelog(root).read_text()
    changelog(root).write_text(text.replace("\n\n## ", "\n\n## Unreleased\n\n- More.\n\n## ", 1))
    commit(root)


def test_a_release_sets_the_version_dates_the_changelog_builds_commits_and_tags(checkout):
    assert run(checkout, "inner", "0.3.1") == (0, ["inner-v0.3.1"])
    assert '__version__ = "0.3.1"\n' in init(checkout).read_text()
    assert changelog(checkout).read_text().splitlines()[2] == "## 0.3.1 (2030-01-02)"
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "describe").strip() == "inner-v0.3.1"
    assert git(checkout, "log", "-1", "--format=%s").strip() == "inner 0.3.1"
    assert git(checkout, "show", "--stat", "--format=", "HEAD").count("|") == 2


def test_the_first_release_takes_the_version_that_the_package_has_and_the_next_one_counts_up(checkout):
    assert run(checkout, "inner") == (0, ["inner-v0.3.0"])
    add_entry(checkout)
    assert run(checkout, "inner") == (0, ["inner-v0.3.1"])
    assert changelog(checkout).read_text().count("(2030-01-02)") == 2


def test_a_heading_that_is_a_version_says_which_one_is_released(checkout, capsys):
    changelog(checkout).write_text("# Changelog\n\n## 0.3.5\n\n- Something new.\n")
    commit(checkout)
    assert run(checkout, "inner", "0.3.6") == (1, [])
    assert "the newest section of the changelog is 0.3.5, not 0.3.6" in capsys.readouterr().err
    assert run(checkout, "inner") == (0, ["inner-v0.3.5"])


def test_a_version_with_an_older_section_is_taken_even_without_a_tag(checkout):
    text = changelog(checkout).read_text()
    changelog(checkout).write_text(text + "\n## 0.3.0\n\n- Something old.\n")
    commit(checkout)
    assert run(checkout, "inner") == (0, ["inner-v0.3.1"])


def test_packages_are_released_one_by_one(checkout):
    assert run(checkout, "inner", "0.3.1")[0] == 0
    assert run(checkout, "outer-one", "0.9")[0] == 0
    assert git(checkout, "tag").split() == ["inner-v0.3.1", "outer-one-v0.9"]
    assert '__version__ = "0.3.1"' in init(checkout).read_text()


def test_a_dry_run_checks_and_shows_everything_and_changes_nothing(checkout, capsys):
    head = git(checkout, "rev-parse", "HEAD")
    assert run(checkout, "inner", "--dry-run") == (0, [])
    said = capsys.readouterr().out
    assert "inner-v0.3.0" in said
    assert "+## 0.3.0 (2030-01-02)" in said
    assert git(checkout, "status", "--porcelain") == git(checkout, "tag") == ""
    assert git(checkout, "rev-parse", "HEAD") == head


def test_a_dirty_tree_is_refused_with_what_is_dirty(checkout, capsys):
    (checkout / "stray.txt").write_text("x")
    assert run(checkout, "inner", "--dry-run") == (1, [])
    assert "stray.txt" in capsys.readouterr().err


def test_a_changelog_without_news_is_refused(checkout, capsys):
    assert run(checkout, "inner")[0] == 0
    assert run(checkout, "inner") == (1, [])
    assert "has nothing new: its newest section is 0.3.0 (2030-01-02)" in capsys.readouterr().err
    changelog(checkout).write_text("# Changelog\n\n## Unreleased\n\n## 0.3.0 (2030-01-02)\n\n- Something.\n")
    commit(checkout)
    assert run(checkout, "inner") == (1, [])
    assert "section Unreleased is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.3.0", "0.3.0 has a tag or a section already; the next free version is 0.3.1"),
        ("0.2.9", "0.2.9 is below 0.3.0, the newest release"),
        ("soon", "'soon' is not a version; expected one like 0.3.1"),
        ("0.4.0", "packages/outer-one/pyproject.toml asks for inner>=0.3,<0.4, which leaves out 0.4.0"),
    ],
)
def test_a_version_that_cannot_be_used_is_refused(checkout, capsys, version, said):
    git(checkout, "tag", "inner-v0.3.0")
    assert run(checkout, "inner", version) == (1, [])
    assert said in capsys.readouterr().err


def test_an_unknown_package_is_refused_with_those_that_exist(checkout, capsys):
    assert run(checkout, "outer_one") == (1, [])
    assert "no package 'outer_one'; expected one of inner, outer-one" in capsys.readouterr().err


def test_a_failed_build_leaves_the_checkout_as_it_was(checkout):
    def fail(root, planned):
        assert planned.version in init(root).read_text()
        raise subprocess.CalledProcessError(1, "build")

    with pytest.raises(subprocess.CalledProcessError):
        release.main(["inner", "0.3.1"], root=checkout, today=TODAY, build=fail)
    assert git(checkout, "status", "--porcelain") == git(checkout, "tag") == ""

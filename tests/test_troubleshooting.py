"""Every message that a user can get has its entry in docs/troubleshooting, and no entry is out of date."""

import ast
import textwrap
from pathlib import Path

import pytest
from tools import messages


def found_in(source, tmp_path, monkeypatch):
    """The texts that the collector finds in a package of one file."""
    folder = tmp_path / "packages" / "made" / "src"
    folder.mkdir(parents=True)
    (folder / "made.py").write_text(textwrap.dedent(source))
    monkeypatch.setattr(messages, "ROOT", tmp_path)
    return [message.text for message in messages.Package("made").messages()]


def test_every_message_has_an_entry_and_every_entry_a_message():
    missing, stale = messages.missing_and_stale()
    assert [*missing, *stale] == [], "\n" + messages.report(missing, stale)


def test_no_message_is_explained_twice_on_a_page():
    for page in messages.PAGES.glob("*.md"):
        texts = messages.entries(page)
        assert len(texts) == len(set(texts)), page.name


def test_every_entry_has_an_explanation_below_it():
    """Entries that follow each other directly share the explanation below the last."""
    for page in messages.PAGES.glob("*.md"):
        sections = page.read_text().split("\n#### ")[1:]
        ends = [i for i, text in enumerate(sections) if text.count("\n\n") or i == len(sections) - 1]
        for i in ends:
            explanation = sections[i].partition("\n\n")[2].partition("\n## ")[0]
            assert len(explanation.split()) >= 3, (page.name, sections[i].splitlines()[0])


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('raise ValueError(f"{x!r} is not a size; use {y}")', ["… is not a size; use …"]),
        ('raise OSError("no space" + f" on {disk} left")', ["no space on … left"]),
        ('raise KeyError("one way to say it" if a else "another way to say it")',
         ["one way to say it", "another way to say it"]),
        ('def f():\n    return TypeError("made here, raised elsewhere")', ["made here, raised elsewhere"]),
        ('def why():\n    return "this is the reason"\nraise ValueError(why())', ["this is the reason"]),
        ('def f():\n    text = "kept under a name"\n    raise ValueError(text)', ["kept under a name"]),
        ('def fail(why):\n    raise ValueError(f"{why}")\nfail("said by a caller")', ["said by a caller"]),
        ('_log.warning("%s took %.1f seconds too long", a, b)', ["… took … seconds too long"]),
        ('WHY = {"a": "an answer from a table"}\nraise ValueError(f"{WHY[a]}")', ["an answer from a table"]),
        ('raise AssertionError("an invariant is not for users")', []),
    ],
)  # fmt: skip
def test_a_message_is_found_however_it_is_built(source, texts, tmp_path, monkeypatch):
    ast.parse(source)
    assert found_in(source, tmp_path, monkeypatch) == texts


def test_a_missing_entry_is_named_with_its_page_and_its_place():
    where = messages.ROOT / "packages" / "dbuffer" / "src" / "dbuffer" / "_mesh.py"
    text = messages.report([messages.Message("a new message", where, 7)], [("dbuffer", "an old one")])
    assert "docs/troubleshooting/dbuffer.md lacks `a new message`" in text
    assert str(Path("packages/dbuffer/src/dbuffer/_mesh.py:7")) in text
    assert "explains what no source says: `an old one`" in text

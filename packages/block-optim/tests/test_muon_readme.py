"""The examples of the README's sections on Muon and routing run, and print what is shown."""

import re

from readme_text import readme


def example(section):
    text = readme().split(f"\n## {section}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return text, code


def test_the_example_on_muon_prints_its_plan(capsys):
    _, code = example("Muon")
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("Muon plan\n10 matrices, 1 rank, ")
    assert "imbalance 1.000" in printed


def test_the_example_on_routing_prints_what_is_shown(capsys):
    text, code = example("Routing")
    exec(compile(code, "README.md", "exec"), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [line.split() for line in text.splitlines() if line.startswith("    ") and "..." not in line]
    table = [line for line in shown if line and line[0] in ("parameter", "*.weight", "*.bias", "adamw:")]
    assert len(table) == 6
    assert all(line in printed for line in table)

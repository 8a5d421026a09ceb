"""The examples of the README and of the guide run, and print what is shown. (Lion: in test_own_optimizer.py.)"""

import pytest
import torch
from readme_examples import run_examples, section


@pytest.mark.parametrize("title", ["In two minutes", "Averages of weights", "Shampoo and SOAP", "Muon"])
def test_the_examples_run_and_their_asserts_hold(title):
    torch.manual_seed(0)
    run_examples(title)


def test_the_example_on_routing_prints_what_is_shown(capsys):
    title = "One optimizer for a model"
    run_examples(title)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [
        line.split() for line in section(title).splitlines() if line.startswith("    ") and "..." not in line
    ]
    table = [line for line in shown if line and line[0] in ("parameter", "*.weight", "*.bias", "adamw:")]
    assert len(table) == 6
    assert all(line in printed for line in table)

"""The user's random state is the user's."""

import random
import tempfile
from pathlib import Path

import numpy as np

from layout_planner import Layout, Rows, Tile, load_model, plan
from layout_planner._cli import main
from layout_planner.baselines import in_given_order


def test_nothing_here_draws_random_numbers(capsys):
    states = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    group = load_model("gpt-oss-20b").groups[1]
    for block in (Rows(16), Tile(32, 32)):
        layout = plan(group.specs(block), 24, segment_cost=1000)
        assert Layout.from_json(layout.to_json()).to_svg()
    in_given_order(group.specs(Rows(1)), 8)
    assert main(["sweep", "--model", "llama-3-8b", "--world-size", "8,24"]) == 0
    with tempfile.TemporaryDirectory() as folder:
        assert (
            main(["draw", "--model", "llama-3-8b", "--world-size", "8", "-o", str(Path(folder) / "x.svg")])
            == 0
        )
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()) == states

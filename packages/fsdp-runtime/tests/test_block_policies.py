"""Block policies say what they are named for, and travel to other processes."""

import pickle

import pytest
import torch

from fsdp_runtime import block_policies as bp
from layout_planner import Elements, Rows, Tile, Whole

MATRIX, STACK, VECTOR, SCALAR = torch.empty(6, 4), torch.empty(3, 6, 4), torch.empty(4), torch.empty(())


def blocks(policy):
    return [policy(name, t) for name, t in zip("msvs", (MATRIX, STACK, VECTOR, SCALAR), strict=True)]


class Declares:
    @staticmethod
    def block_policy():
        return bp.by_pattern({"m": Whole()})


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (bp.rows(3), [Rows(3)] * 4),
        (bp.elements(7), [Elements(7)] * 4),
        (bp.tiles(2, 2), [Tile(2, 2), Tile(2, 2), None, None]),
        (bp.whole(), [Whole(), Tile(6, 4), None, None]),
        (bp.by_pattern({"^m": Rows(2), "s|v": bp.whole()}), [Rows(2), Tile(6, 4), None, None]),
        (bp.declared_by(Declares, bp.rows(5)), [Whole(), Rows(5), Rows(5), Rows(5)]),
    ],
)
def test_each_policy_names_its_blocks_and_can_be_pickled(policy, wanted):
    assert blocks(policy) == wanted
    assert blocks(pickle.loads(pickle.dumps(policy))) == wanted


def test_a_pattern_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"block policy: '\(' is not a regular expression"):
        bp.by_pattern({"(": Rows(1)})


def test_an_optimizer_that_declares_nothing_is_refused():
    with pytest.raises(TypeError, match=r"SGD.* declares no blocks"):
        bp.declared_by(torch.optim.SGD)

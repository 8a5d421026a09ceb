"""On a device of clocks our step is not longer than FSDP2's, and gathers overlap what comes before them."""

from dataclasses import replace

import pytest
from tools.overlap import CASES, Case, fsdp2, ours


@pytest.mark.parametrize("case", [case for case in CASES if case.ratio == 1.0], ids=lambda case: case.name)
def test_a_step_is_not_longer_than_with_fsdp2s_order_of_streams(case: Case):
    assert ours(case).length <= fsdp2(case).length


def test_a_network_that_takes_no_time_leaves_only_the_copies_of_gradients():
    case = replace(CASES[0], ratio=0.0)
    assert ours(case).exposed < fsdp2(case).exposed
    assert ours(case).exposed < 0.1 * ours(case).compute

"""Bytes of ZeRO's stages: counted, and by formula."""

import pytest
from bench import counts
from bench.models import WORKLOADS, build


@pytest.mark.parametrize("name", counts.RECIPES)
def test_bytes_of_zeros_stages_are_those_of_the_formula_and_padding(name):
    workload, sizes = WORKLOADS["tiny"], (8, 4, 3)
    model = build(workload.shape)
    total, blocks = counts.nbytes_of(model.parameters()), counts.nbytes_of(model.blocks.parameters())
    counted = counts.zero_bytes(name, workload, *sizes)
    assert counted == pytest.approx(counts.zero_formula(name, blocks, total - blocks, *sizes), rel=0.02)

"""The benchmarks of weights and bytes: figures by formula, and a round trip that finds damage."""

import pytest
from bench import checkpoint, counts
from bench.models import WORKLOADS, build

SHAPES = checkpoint._shapes(1e6, width=16)


@pytest.mark.long
def test_weights_keep_their_bytes_through_all_forms_of_files(tmp_path):
    rows = checkpoint.round_trip(tmp_path, SHAPES, "bfloat16", 2)
    assert [row[0] for row in rows] == [
        "load_safetensors", "save_safetensors", "safetensors to DCP", "DCP to safetensors",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["back"]


@pytest.mark.parametrize("name", counts.RECIPES)
def test_bytes_of_zeros_stages_are_those_of_the_formula_and_padding(name):
    workload, sizes = WORKLOADS["tiny"], (8, 4, 3)
    model = build(workload.shape)
    total, blocks = counts.nbytes_of(model.parameters()), counts.nbytes_of(model.blocks.parameters())
    counted = counts.zero_bytes(name, workload, *sizes)
    assert counted == pytest.approx(counts.zero_formula(name, blocks, total - blocks, *sizes), rel=0.02)

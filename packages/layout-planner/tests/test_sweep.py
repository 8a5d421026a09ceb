"""A sweep's figures are those of the plans it stands for."""

from layout_planner import Rows, plan
from layout_planner._sweep import Options, measure, sweep
from layout_planner.models import load_model

OPTIONS = Options()
GPT = load_model("gpt-oss-120b")


def test_totals_count_every_layer_of_a_group():
    layouts = [(group.count, plan(group.specs(Rows(32)), 96)) for group in GPT.groups]
    found = measure(GPT, 96, Rows(32), OPTIONS)
    assert found.numel == GPT.numel
    assert found.planned == sum(count * layout.padded_numel for count, layout in layouts)
    assert found.lower_bound == sum(count * layout.lower_bound for count, layout in layouts)
    assert found.bytes_per_rank == 2 * found.planned / 96


def test_a_sweep_goes_up_in_world_size_for_one_block_after_another():
    found = sweep(load_model("llama-3-8b"), [16, 8, 8], [Rows(1), Rows(16)], OPTIONS)
    assert [(str(m.block), m.world_size) for m in found] == [
        ("rows:1", 8),
        ("rows:1", 16),
        ("rows:16", 8),
        ("rows:16", 16),
    ]

"""A sweep's figures are those of the plans it stands for."""

from layout_planner import Rows, plan
from layout_planner._sweep import Options, measure
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

"""A sweep's figures are those of the plans it stands for, and its advice follows from plans too."""

import pytest

from layout_planner import Rows, Whole, plan
from layout_planner._advice import advise, merged
from layout_planner._sweep import Options, measure, sweep
from layout_planner.models import GroupShape, ModelShape, ShapeEntry, load_model

OPTIONS = Options()
GPT = load_model("gpt-oss-120b")


def advice_on(model, world_sizes, blocks):
    found = list(advise(model, list(sweep(model, world_sizes, blocks, OPTIONS)), OPTIONS))
    return {
        topic: [advice for advice in found if advice.topic == topic] for topic in {a.topic for a in found}
    }


def test_totals_count_every_layer_of_a_group():
    layouts = [(group.count, plan(group.specs(Rows(32)), 96)) for group in GPT.groups]
    found = measure(GPT, 96, Rows(32), OPTIONS)
    assert found.numel == GPT.numel
    assert found.planned == sum(count * layout.padded_numel for count, layout in layouts)
    assert found.lower_bound == sum(count * layout.lower_bound for count, layout in layouts)
    assert found.bytes_per_rank == 2 * found.planned / 96


@pytest.mark.long
def test_options_reach_the_planner():
    experts = measure(GPT, 96, Rows(128), Options(period="expert"))
    assert experts.planned != measure(GPT, 96, Rows(128), OPTIONS).planned
    one = measure(GPT, 1024, Rows(16), Options(max_segments=1))
    assert one.planned > measure(GPT, 1024, Rows(16), OPTIONS).planned
    odd = ModelShape("odd", (GroupShape("g", 1, (ShapeEntry("w", (5,)),)),))
    assert measure(odd, 1, Rows(1), Options(align=64)).planned == 64


def test_a_sweep_goes_up_in_world_size_for_one_block_after_another():
    found = sweep(load_model("llama-3-8b"), [16, 8, 8], [Rows(1), Rows(16)], OPTIONS)
    assert [(str(m.block), m.world_size) for m in found] == [
        ("rows:1", 8),
        ("rows:1", 16),
        ("rows:16", 8),
        ("rows:16", 16),
    ]


def test_merged_layers_hold_the_same_parameters_with_names_of_their_own():
    for layers in (2, 4, 5):
        found = merged(load_model("deepseek-v3"), layers)
        assert found.numel == load_model("deepseek-v3").numel
        for group in found.groups:
            names = [entry.name for entry in group.tensors]
            assert len(set(names)) == len(names)


def test_merged_layers_leave_what_does_not_divide_as_one_group():
    groups = {group.name: group.count for group in merged(load_model("deepseek-v3"), 4).groups}
    assert groups == {"embed": 1, "layers.0-2": 3, "layers.3-60": 14, "layers.3-60, the last 2": 1, "head": 1}


def test_advice_on_blocks_prefers_those_that_pad_little():
    (advice,) = advice_on(GPT, [1024], [Rows(1), Rows(128)])["block"]
    assert "prefer rows:1, within 1%" in advice.text
    assert {option["block"] for option in advice.options} == {
        "rows:1",
        "rows:64",
        "rows:128",
    }  # and half of 128
    assert advice.options[0]["padding_ratio"] == measure(GPT, 1024, Rows(1), OPTIONS).padding()


def test_advice_on_world_sizes_names_one_nearby_that_pads_less():
    (advice,) = advice_on(GPT, [8, 1024], [Rows(16)])["world size"]
    best = advice.options[0]
    assert f"prefer {best['world_size']}" in advice.text
    assert best["world_size"] % 8 == 0
    assert 768 <= best["world_size"] <= 1280
    assert best["padding_ratio"] == measure(GPT, best["world_size"], Rows(16), OPTIONS).padding()
    assert best["padding_ratio"] < measure(GPT, 1024, Rows(16), OPTIONS).padding()
    assert "8 pads least" in advice.text


def test_advice_on_world_sizes_says_when_there_is_nothing_to_gain():
    (advice,) = advice_on(load_model("llama-3-8b"), [8], [Rows(1)])["world size"]
    assert "no whole number of nodes near 8 pads noticeably less than" in advice.text


def test_advice_on_shard_groups_prefers_the_largest_divisor_that_pads_little():
    (advice,) = advice_on(GPT, [1024], [Rows(16)])["shard group"]
    fine = [d for d in (1024, 512, 256, 128) if measure(GPT, d, Rows(16), OPTIONS).padding() <= 0.01]
    assert f"prefer {fine[0]} x {1024 // fine[0]} replicas" in advice.text
    assert all(1024 % option["world_size"] == 0 for option in advice.options)


def test_advice_on_shard_groups_leaves_a_world_that_pads_little_whole():
    (advice,) = advice_on(GPT, [64], [Rows(1)])["shard group"]
    assert "all 64 ranks in one shard group pad" in advice.text


def test_advice_on_merging_names_padding_and_memory_of_each_choice():
    (advice,) = advice_on(GPT, [1024], [Rows(16)])["merged layers"]
    found = {option["layers_per_group"]: option["padding_ratio"] for option in advice.options}
    assert found[2] == measure(merged(GPT, 2), 1024, Rows(16), OPTIONS).padding()
    assert found[4] < found[2] < found[1]
    assert "prefer 4 layers per group" in advice.text
    assert "6.43 GB gathered at once" in advice.text
    assert "25.7 GB gathered at once" in advice.text


def test_advice_on_merging_says_when_no_two_layers_are_alike():
    model = ModelShape("one", (GroupShape("g", 1, (ShapeEntry("w", (64, 8)),)),))
    (advice,) = advice_on(model, [4], [Whole()])["merged layers"]
    assert advice.text.endswith("no two layers of this model are equal.")


def test_advice_holds_for_a_single_rank():
    assert "all 1 ranks" in advice_on(load_model("llama-3-8b"), [1], [Rows(1)])["shard group"][0].text


@pytest.mark.parametrize("name", ["llama-3-70b", "gpt-oss-120b", "qwen3-235b-a22b"])
def test_no_plan_of_a_model_is_below_its_lower_bound(name):
    for found in sweep(load_model(name), [64, 512, 1024], [Rows(1), Rows(16), Rows(32), Rows(128)], OPTIONS):
        assert found.gap >= 0, found


def test_advice_at_the_most_ranks_stays_within_them():
    model = ModelShape("tiny", (GroupShape("layers.0", 1, (ShapeEntry("w", (64, 8)),)),))
    measures = list(sweep(model, [1 << 20], [Rows(1)], Options()))
    assert len(list(advise(model, measures, Options()))) == 4

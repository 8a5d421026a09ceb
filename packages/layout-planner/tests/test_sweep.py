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


def padding(world_size, block, model=GPT):
    return measure(model, world_size, block, OPTIONS).padding()


def test_advice_on_blocks_prefers_those_that_pad_little():
    (advice,) = advice_on(GPT, [1024], [Rows(1), Rows(128)])["block"]
    assert "block at 1024 ranks: prefer rows:1 (" in advice.text
    blocks = {option["block"] for option in advice.options}
    assert blocks == {"rows:1", "rows:64", "rows:128"}  # and half of 128
    assert advice.options[0]["padding_ratio"] == padding(1024, Rows(1))


def test_advice_on_world_sizes_names_whole_nodes_nearby_and_keeps_what_pads_little():
    (advice,) = advice_on(GPT, [8, 1024], [Rows(16)])["world size"]
    sizes = [option["world_size"] for option in advice.options]
    assert all(size % 8 == 0 and 768 <= size <= 1280 for size in sizes)
    ratios = [option["padding_ratio"] for option in advice.options]
    assert ratios == sorted(ratios)
    assert ratios[0] == padding(sizes[0], Rows(16)) < padding(1024, Rows(16))
    assert ratios[0] > 0.01  # none is fine: the one that pads least
    assert f"prefer {sizes[0]} (" in advice.text
    (advice,) = advice_on(load_model("llama-3-8b"), [8], [Rows(1)])["world size"]
    assert "near 8 ranks: prefer 8 (" in advice.text


def test_advice_on_shard_groups_prefers_the_largest_divisor_that_pads_little():
    (advice,) = advice_on(GPT, [1024], [Rows(16)])["shard group"]
    fine = [d for d in (1024, 512, 256, 128) if padding(d, Rows(16)) <= 0.01]
    assert f"prefer {fine[0]} x {1024 // fine[0]} replicas" in advice.text
    assert all(1024 % option["world_size"] == 0 for option in advice.options)
    (advice,) = advice_on(GPT, [64], [Rows(1)])["shard group"]
    assert "prefer 64 x 1 replicas" in advice.text
    (advice,) = advice_on(load_model("llama-3-8b"), [1], [Rows(1)])["shard group"]
    assert "prefer 1 x 1 replicas" in advice.text


def test_advice_on_merging_names_padding_and_memory_of_each_choice():
    (advice,) = advice_on(GPT, [1024], [Rows(16)])["merged layers"]
    found = {option["layers_per_group"]: option["padding_ratio"] for option in advice.options}
    assert found[2] == padding(1024, Rows(16), merged(GPT, 2))
    assert found[4] < found[2] < found[1]
    fine = next((n for n in (1, 2, 4) if found[n] <= 0.01), 4)
    assert f"prefer {fine} layers per group" in advice.text
    assert "6.43 GB gathered at once" in advice.text
    assert "25.7 GB gathered at once" in advice.text
    alone = ModelShape("one", (GroupShape("g", 1, (ShapeEntry("w", (64, 8)),)),))
    (advice,) = advice_on(alone, [4], [Whole()])["merged layers"]
    assert [option["layers_per_group"] for option in advice.options] == [1]


@pytest.mark.parametrize("name", ["llama-3-70b", "gpt-oss-120b", "qwen3-235b-a22b"])
def test_no_plan_of_a_model_is_below_its_lower_bound(name):
    for found in sweep(load_model(name), [64, 512, 1024], [Rows(1), Rows(16), Rows(32), Rows(128)], OPTIONS):
        assert found.gap >= 0, found

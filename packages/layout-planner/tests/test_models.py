"""Model shapes are those of the published models."""

import pytest

from layout_planner import Rows, Tile
from layout_planner.models import ShapeEntry, load_model, model_names, separate_experts

PUBLISHED = {  # parameters, exact
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
}


def layer(model, number=-2):
    """The tensors of a layer by name; -2 is the last kind of layer, before the head."""
    return {entry.name: entry for entry in load_model(model).groups[number].tensors}


def test_every_known_model_has_a_published_count():
    assert sorted(model_names()) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_model_add_up_to_the_published_count(name):
    assert load_model(name).numel == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_are_unique_in_each_group(name):
    for group in load_model(name).groups:
        names = [entry.name for entry in group.tensors]
        assert len(set(names)) == len(names)


def test_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpt-6'.*llama-3-8b.*kimi-k2"):
        load_model("gpt-6")


def test_unknown_group_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"llama-3-8b has no group 'tail'; it has embed, layers\.0-31, head"):
        load_model("llama-3-8b").group("tail")


def test_embeddings_are_a_group_and_the_head_holds_the_final_norm():
    groups = load_model("llama-3-8b").groups
    assert [entry.shape for entry in groups[0].tensors] == [(128256, 4096)]
    assert [(entry.name, entry.shape) for entry in groups[-1].tensors] == [
        ("norm.weight", (4096,)),
        ("lm_head.weight", (128256, 4096)),
    ]


def test_alike_layers_are_one_group_with_a_count():
    assert [(group.name, group.count) for group in load_model("deepseek-v3").groups] == [
        ("embed", 1),
        ("layers.0-2", 3),
        ("layers.3-60", 58),
        ("head", 1),
    ]


def test_gpt_oss_has_stacked_experts_in_checkpoint_order_with_biases_and_sinks():
    found = layer("gpt-oss-120b")
    assert found["mlp.experts.gate_up_proj"] == ShapeEntry("mlp.experts.gate_up_proj", (128, 5760, 2880), 128)
    assert found["mlp.experts.down_proj_bias"].shape == (128, 2880)
    assert found["mlp.router.bias"].shape == (128,)
    assert found["self_attn.sinks"].shape == (64,)
    assert found["self_attn.o_proj.weight"].shape == (2880, 4096)


def test_deepseek_attention_goes_through_low_rank_projections():
    found = layer("deepseek-v3")
    assert found["self_attn.q_b_proj.weight"].shape == (128 * 192, 1536)
    assert found["self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 7168)
    assert found["self_attn.kv_b_proj.weight"].shape == (128 * 256, 512)


def test_deepseek_first_layers_are_dense_and_later_ones_have_a_shared_expert():
    assert layer("deepseek-v3", 1)["mlp.up_proj.weight"].shape == (18432, 7168)
    assert layer("deepseek-v3")["mlp.shared_experts.up_proj.weight"].shape == (2048, 7168)
    assert layer("deepseek-v3")["mlp.gate.e_score_correction_bias"].shape == (256,)


def test_kimi_has_more_experts_and_fewer_heads_than_deepseek():
    assert layer("kimi-k2")["mlp.experts.down_proj"].shape == (384, 7168, 2048)
    assert layer("kimi-k2")["self_attn.o_proj.weight"].shape == (7168, 64 * 128)


def test_qwen_has_query_and_key_norms_of_one_head():
    assert layer("qwen3-235b-a22b")["self_attn.q_norm.weight"].shape == (128,)


def test_a_tile_becomes_rows_on_tensors_without_columns():
    blocks = {spec.name: spec.block for spec in load_model("llama-3-8b").groups[1].specs(Tile(32, 16))}
    assert blocks["input_layernorm.weight"] == Rows(32)
    assert blocks["mlp.up_proj.weight"] == Tile(32, 16)


def test_period_expert_starts_blocks_anew_in_each_expert():
    entry = ShapeEntry("experts.w", (4, 5, 8), 4)
    assert entry.spec(Rows(2), "expert").period == 40
    assert entry.spec(Rows(2), "expert").grid.num_blocks == 12
    assert entry.spec(Rows(2)).grid.num_blocks == 10


def test_period_expert_leaves_unstacked_tensors_alone():
    assert ShapeEntry("w", (5, 8)).spec(Rows(2), "expert").period is None


def test_a_period_of_another_name_is_refused():
    with pytest.raises(ValueError, match="w: period 'layer' is neither"):
        ShapeEntry("w", (5, 8)).spec(Rows(2), "layer")  # type: ignore[arg-type]


def test_separate_experts_are_those_of_the_checkpoint_and_as_many_parameters():
    for name in ("deepseek-v3", "qwen3-235b-a22b", "kimi-k2"):
        model = separate_experts(load_model(name))
        assert model.numel == PUBLISHED[name]
        assert all(entry.experts == 1 for group in model.groups for entry in group.tensors)
    entries = {
        entry.name: entry.shape for entry in separate_experts(load_model("deepseek-v3")).groups[2].tensors
    }
    assert (
        entries["mlp.experts.255.gate_proj.weight"] == entries["mlp.experts.0.up_proj.weight"] == (2048, 7168)
    )
    assert entries["mlp.experts.7.down_proj.weight"] == (7168, 2048)


@pytest.mark.parametrize(
    ("name", "says"),
    [("llama-3-8b", "has no stacked experts"), ("gpt-oss-20b", "stacked in its checkpoint too")],
)
def test_a_model_that_never_stores_experts_separately_refuses_to(name, says):
    with pytest.raises(ValueError, match=says):
        separate_experts(load_model(name))

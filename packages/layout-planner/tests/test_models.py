"""Model shapes are those of the published models; a sweep's figures are those of the plans it stands for."""

from layout_planner import Rows, Tile, plan
from layout_planner._sweep import Options, measure
from layout_planner.models import load_model, model_names, separate_experts

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


def test_every_known_model_has_the_published_parameters_and_names_them_once():
    assert {name: load_model(name).numel for name in model_names()} == PUBLISHED
    for group in (group for name in PUBLISHED for group in load_model(name).groups):
        assert len({entry.name for entry in group.tensors}) == len(group.tensors)


def test_alike_layers_are_one_group_with_a_count():
    assert [(group.name, group.count) for group in load_model("deepseek-v3").groups] == [
        ("embed", 1),
        ("layers.0-2", 3),
        ("layers.3-60", 58),
        ("head", 1),
    ]


def test_a_tile_becomes_rows_on_tensors_without_columns():
    blocks = {spec.name: spec.block for spec in load_model("llama-3-8b").groups[1].specs(Tile(32, 16))}
    assert blocks["input_layernorm.weight"] == Rows(32)
    assert blocks["mlp.up_proj.weight"] == Tile(32, 16)


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


OPTIONS = Options()
GPT = load_model("gpt-oss-120b")


def test_totals_count_every_layer_of_a_group():
    layouts = [(group.count, plan(group.specs(Rows(32)), 96)) for group in GPT.groups]
    found = measure(GPT, 96, Rows(32), OPTIONS)
    assert found.numel == GPT.numel
    assert found.planned == sum(count * layout.padded_numel for count, layout in layouts)
    assert found.lower_bound == sum(count * layout.lower_bound for count, layout in layouts)
    assert found.bytes_per_rank == 2 * found.planned / 96

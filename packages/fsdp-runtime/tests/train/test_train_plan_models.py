"""Plans of models that are not built in: of transformers' configurations, and of checkpoints' tensors."""

import dataclasses
import json

import pytest
import torch
from train_helpers import tiny, train

from fsdp_runtime.train import PRESETS, TrainError, Transformer
from fsdp_runtime.train.plan.command import candidates, print_plan
from fsdp_runtime.train.plan.memory import make_plan
from fsdp_runtime.train.plan.models import find_model
from ragged_shard.testing import run_ranks

SIZES = dataclasses.replace(PRESETS["tiny"], vocab_size=256, tied=False)


@pytest.fixture(scope="module")
def checkpoint(folder):
    """The built-in model's tensors in two files and an index."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = Transformer(SIZES).state_dict()
    names = sorted(tensors)
    files = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    (folder / "model").mkdir()
    for file, listed in files.items():
        safetensors.save_file({name: tensors[name] for name in listed}, folder / "model" / file)
    index = {"weight_map": {name: file for file, listed in files.items() for name in listed}}
    path = folder / "model" / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return str(path)


@pytest.mark.parametrize("optimizer", ["torch-adamw", "adamw8bit", "muon"])
def test_a_checkpoints_units_have_the_bytes_of_the_model_that_it_is_of(folder, checkpoint, optimizer):
    config = tiny(folder, model=SIZES, optimizer=optimizer, precision="bf16")
    known = make_plan(config, 256, 3)
    planned = make_plan(dataclasses.replace(config, hf_config=checkpoint), 1, 3)
    named = {unit.name: dataclasses.replace(unit, name="") for unit in planned.units}
    assert list(named) == ["_Tensors", "blocks.0", "blocks.1"]
    assert list(named.values()) == [dataclasses.replace(unit, name="") for unit in known.units]
    assert (planned.at_rest, planned.optimizer_step) == (known.at_rest, known.optimizer_step)


def train_beside_others(config, out):
    """Train in a process that has tensors of other work, which are not the run's."""
    others = torch.ones(1 << 20)
    summary = train(config, out)
    assert others.all()
    return summary


def test_a_checkpoints_plan_is_what_a_run_holds_but_for_its_activations(folder, checkpoint, tmp_path):
    config = tiny(folder, model=SIZES, batch=2, seq_len=8, steps=6, measure=True)
    plan = make_plan(dataclasses.replace(config, hf_config=checkpoint), 1, 2)
    activations = make_plan(config, 256, 2).activations
    measured = run_ranks(2, train_beside_others, config, tmp_path)[0]
    assert measured["measured_rest"] == pytest.approx(plan.at_rest, rel=0.001)
    assert 0.9 * plan.peak <= measured["measured_peak"] <= plan.peak + activations
    assert plan.activations == 0


def test_a_checkpoints_plan_says_that_activations_are_missing_and_lists_splits(folder, checkpoint, capsys):
    assert print_plan(tiny(folder, hf_config=checkpoint), 4) == 0
    printed = capsys.readouterr().out
    assert f"Activations are not counted: {checkpoint} has tensors only" in printed
    assert "| blocks.0 to blocks.1 (2, each) |" in printed
    assert "| fsdp 2 x hsdp 2 |" in printed
    assert {(s.tp, s.pp, s.cp, s.ep) for s in candidates(tiny(folder, hf_config=checkpoint), 4)} == {
        (1, 1, 1, 1)
    }


def test_a_folder_is_its_config_or_else_its_only_index(tmp_path):
    for name in ("model.safetensors.index.json", "config.json"):
        (tmp_path / name).touch()
        assert find_model(str(tmp_path)) == str(tmp_path / name)


def llama(tmp_path, **changes):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, **changes,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16"}, {"checkpointing": True}, {"optimizer": "muon", "accumulate": 2}]
)
def test_a_transformers_models_plan_is_what_a_run_holds(folder, tmp_path, changes):
    config = tiny(folder, hf_config=llama(tmp_path), seq_len=64, batch=8, steps=6, measure=True, **changes)
    plan = make_plan(config, 1, 2)
    measured = run_ranks(2, train, config, tmp_path / "run")[0]
    assert measured["measured_rest"] == pytest.approx(plan.at_rest, rel=0.001)
    assert 0.88 * plan.peak <= measured["measured_peak"] <= 1.03 * plan.peak


def test_a_forward_that_needs_values_is_refused_with_what_can_be_planned(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = tiny(folder, hf_config=str(tmp_path / "config.json"))
    with pytest.raises(TrainError, match="fail on tensors without values in fp32 "):
        make_plan(config, 1, 2)
    assert make_plan(dataclasses.replace(config, precision="bf16"), 1, 2).activations > 0


def test_a_checkpoint_is_no_model_to_train(folder, checkpoint, tmp_path):
    assert "--hf-config" in train(tiny(folder, system="one", hf_config=checkpoint), tmp_path)
    assert torch.get_default_dtype() == torch.float32

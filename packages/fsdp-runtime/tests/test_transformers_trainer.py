"""transformers' Trainer and from_pretrained with models that we have sharded, next to FSDP2 in the same trainer.

On CPU Accelerate takes DistributedDataParallel. The tests tell its state that the ranks are FSDP's, as on GPUs.
Models that from_pretrained has sharded need no such thing.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import assert_same_values, example_script, llama, with_examples
from test_accelerate import fresh_state

from fsdp_runtime import block_policies
from fsdp_runtime.integrations import transformers as ours
from ragged_shard import RaggedDTensor
from ragged_shard.state_dict import full_state_dict
from ragged_shard.testing import on_ranks, record_collectives

pytest.importorskip("accelerate", reason="accelerate is not installed (the extra `accelerate`)")
pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")


def trainer_class(system):
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer

    class OnCPU(Trainer):
        """The trainer, whose ranks on CPU are FSDP2's."""

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if self.args.fsdp:
                for state in (AcceleratorState, PartialState):
                    state._shared_state["distributed_type"] = DistributedType.FSDP
                plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
                self.accelerator.state.fsdp_plugin = plugin
                self.is_fsdp_enabled = True

        def training_step(self, *args, **kwargs):
            with record_collectives() as record:
                loss = super().training_step(*args, **kwargs)
            reductions = sum("reduce_scatter" in kind for kind in record.kinds)
            self.reductions: list[int] = [*getattr(self, "reductions", []), reductions]
            return loss

    return type("OursOnCPU", (ours.RaggedTrainer, OnCPU), {}) if system == "ours" else OnCPU


def examples(count=32):
    rows = torch.randint(12, (count, 5), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_for(system, folder, model, kind="FULL_STATE_DICT", shard_options=None, **options):
    from transformers import TrainingArguments

    fresh_state()
    settings: dict[str, Any] = {
        "max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "max_grad_norm": 0.5, "report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no",
    }  # fmt: skip
    if kind is not None:
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": kind}
        settings.update(fsdp=True, fsdp_config=layers)
    args = TrainingArguments(output_dir=str(folder), **{**settings, **options})
    data = {"train_dataset": examples(), "eval_dataset": examples(8)}
    more = {"shard_options": shard_options} if system == "ours" else {}
    return trainer_class(system)(model=model, args=args, **data, **more)


def history(trainer):
    """Losses and norms of the steps, and losses of evaluations."""
    entries = trainer.state.log_history
    return [e[key] for e in entries for key in ("loss", "grad_norm", "eval_loss") if key in e]


@on_ranks(2)
def test_a_compiled_model_is_trained_evaluated_and_saved(tmp_path):
    from safetensors.torch import load_file

    found = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        trainer = trainer_for("ours", tmp_path, llama(), eval_strategy="steps", eval_steps=2, **options)
        trainer.train()
        trainer.evaluate()
        found.append(history(trainer))
        trainer.save_model(str(tmp_path / str(len(found))))
    assert type(trainer.model).__name__ == "OptimizedModule"
    dist.barrier()
    plain, compiled = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "2"))
    torch.testing.assert_close(compiled, plain)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@on_ranks(2)
def test_the_best_model_is_loaded_at_the_end(tmp_path):
    from safetensors.torch import load_file

    each = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options = {"load_best_model_at_end": True, "learning_rate": 0.5, "max_grad_norm": 0.0, **each}
    trainer = trainer_for("ours", tmp_path / "run", llama(), **options)
    trainer.train()
    best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.state.best_metric == best < history(trainer)[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)
    trainer.save_model(str(tmp_path / "saved"))
    full = full_state_dict(trainer.model)
    dist.barrier()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert_same_values(saved, full)


@on_ranks(2)
def test_evaluation_needs_no_training_before_it_and_options_reach_fully_shard(tmp_path):
    plain = trainer_for("fsdp2", tmp_path, llama(), kind=None).evaluate()["eval_loss"]
    options = {"shard_options": {"block_policy": block_policies.rows(4)}}
    trainer = trainer_for("ours", tmp_path, llama(), **options)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-5)
    trainer.train()
    own = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert all(isinstance(param.data, RaggedDTensor) for param in own)
    assert all(param.to_local().shape[0] % 4 == 0 for param in own if len(param) == 12)
    found = history(trainer)
    theirs = trainer_for("fsdp2", tmp_path, llama())
    theirs.train()
    assert found[-8:] == pytest.approx(history(theirs), rel=1e-5)
    with pytest.raises(ValueError, match="a model and optimizer must be passed together"):
        trainer_for("fsdp2", tmp_path, llama()).evaluate()


@with_examples
@on_ranks(2)
def test_the_example_trains(tmp_path):
    script = example_script("train_transformers")
    found = []
    for system in ("fsdp2", "ours"):
        fresh_state()
        options = {"shard_options": {"block_policy": block_policies.rows(8)}} if system == "ours" else {}
        args = script.arguments(str(tmp_path / system), use_cpu=True, disable_tqdm=True)
        found.append(script.train(trainer_class(system), args, **options))
    assert len(found[1]) == 8
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[1][-1] < found[1][0]

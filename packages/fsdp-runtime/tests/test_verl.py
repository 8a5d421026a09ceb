"""verl's FSDP engine on models that we have sharded, compared with the same engine with FSDP2.

The tests register a platform for the CPU with verl.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import example_script, llama, with_examples

from fsdp_runtime import FSDPModule, block_policies
from fsdp_runtime.integrations import verl as ours
from ragged_shard.testing import on_ranks, run_ranks

pytest.importorskip("verl", reason="verl is not installed (the extra `verl`)")


def on_cpu():
    """Make the CPU verl's device."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name, vendor_name = "cpu", "none"
        device_module = SimpleNamespace(
            **vars(torch.cpu),
            empty_cache=lambda: None,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            mem_get_info=lambda: (0, 0),
            get_rng_state=torch.get_rng_state,
            set_rng_state=torch.set_rng_state,
        )

        def current_device(self):
            return "cpu"

        def empty_cache(self):
            pass

        def communication_backend_name(self):
            return "gloo"

    if platform_manager.get_platform().device_name != "cpu":
        platform_manager.set_platform(Cpu())


def saved_model(folder, tied):
    """A tiny Llama on disk, as verl loads it."""
    path = folder / f"llama-{tied}"
    if dist.get_rank() == 0:
        llama(vocab_size=32, tie_word_embeddings=tied).save_pretrained(path)
    dist.barrier()
    return str(path)


def engine_of(folder, system, *, path=None, tied=False, lora=0, options=None, save=(), **config):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    on_cpu()
    model = HFModelConfig(
        path=path or saved_model(folder, tied), load_tokenizer=False, use_remove_padding=False, lora_rank=lora,
        enable_gradient_checkpointing=False, override_config={"attn_implementation": "eager"},
    )  # fmt: skip
    exact = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    settings = FSDPEngineConfig(
        **{"strategy": "fsdp2", "mixed_precision": exact, "use_torch_compile": False, "use_dynamic_bsz": False,
           "micro_batch_size_per_gpu": 2, **config}
    )  # fmt: skip
    kind = FSDPEngineWithLMHead
    kind = ours.engine_class(kind, **(options or {})) if system == "ours" else kind
    checkpoints = CheckpointConfig(save_contents=["model", "optimizer", "extra", *save])
    engine = kind(model, settings, FSDPOptimizerConfig(lr=1e-2, clip_grad=0.5), checkpoints)
    engine.initialize()
    return engine


def batch(step, rows=4):
    """This rank's rows, as verl gives them: nested tensors of several lengths."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    ids = [torch.randint(32, (5 + row % 2,), generator=generator) for row in range(rows)]
    nested = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(row)) for row in ids],
        "loss_mask": [torch.ones(len(row), dtype=torch.int64) for row in ids],
    }
    data = TensorDict(
        {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in nested.items()},
        batch_size=[rows],
    )
    tensordict_utils.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, use_remove_padding=False, temperature=1.0
    )
    return data


def likelihood(model_output, data, dp_group):
    return -model_output["log_probs"].values().sum() / 20, {}


def train(engine, steps=range(3)):
    """Losses and norms."""
    found = []
    with engine.train_mode():
        for step in steps:
            outputs = engine.train_batch(batch(step), likelihood)
            engine.lr_scheduler_step()
            found += [*outputs["loss"], float(outputs["metrics"]["grad_norm"])]
    return found


@on_ranks(3, timeout=280)
def test_losses_and_norms_are_fsdp2s_in_the_same_engine(tmp_path):
    for case in (
        {"tied": True, "reshard_after_forward": False},
        {"param_offload": True, "optimizer_offload": True},
    ):
        theirs = train(engine_of(tmp_path, "fsdp2", **case))
        engine = engine_of(tmp_path, "ours", options={"block_policy": block_policies.rows(4)}, **case)
        assert FSDPModule in type(engine.module).__mro__
        assert train(engine) == pytest.approx(theirs, rel=1e-5), case


@on_ranks(4)
def test_whole_tensors_are_exported_with_replicas_and_deltas_are_refused(tmp_path):
    import transformers

    engine = engine_of(tmp_path, "ours", fsdp_size=2)
    whole = transformers.LlamaForCausalLM.from_pretrained(saved_model(tmp_path, False)).state_dict()
    for name, value in engine.get_per_tensor_param()[0]:
        assert value.equal(whole[name]), name
    with pytest.raises(NotImplementedError, match="delta sync"):
        engine.get_per_tensor_param_shard()


@on_ranks(2)
def test_engines_are_registered_beside_verls_and_the_rest_is_refused(tmp_path):
    import verl.utils.fsdp_utils as theirs
    from torch.distributed.fsdp import fully_shard
    from verl.workers.engine.base import EngineRegistry

    engine_of(tmp_path, "ours")
    assert theirs.fully_shard is fully_shard
    with pytest.raises(ValueError, match='strategy="fsdp"; expected "fsdp2"'):
        engine_of(tmp_path, "ours", strategy="fsdp")
    with pytest.raises(TypeError, match="multiple values for keyword argument 'mesh'"):
        engine_of(tmp_path, "ours", options={"mesh": None})
    before = copy.deepcopy(EngineRegistry._engines)
    try:
        ours.register(block_policy=block_policies.whole())
        found = EngineRegistry.get_engine_cls("language_model", "fsdp2")
        assert found.__name__ == "RaggedFSDPEngineWithLMHead"
        assert (
            EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__ == "RaggedFSDPEngineWithValueHead"
        )
    finally:
        EngineRegistry._engines = before


def example(folder):
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    on_cpu()
    script = example_script("train_verl")
    model, found, before = saved_model(folder, False), [], copy.deepcopy(EngineRegistry._engines)
    try:
        for system in ("theirs", "ours"):
            if system == "theirs":  # verl registers its engines for GPUs and NPUs
                EngineRegistry.register("language_model", "fsdp2", "cpu")(FSDPEngineWithLMHead)
            else:
                ours.register(block_policy=block_policies.rows(8))
            found.append(script.train(model, str(folder / system), steps=6))
    finally:
        EngineRegistry._engines = before
    return found


@with_examples
def test_the_example_trains_as_with_fsdp2(tmp_path):
    for theirs, found in run_ranks(2, example, tmp_path):
        assert found == pytest.approx(theirs, rel=2e-2)  # verl computes in bf16
        assert found[-1] < found[0]
    assert list((tmp_path / "ours").iterdir())

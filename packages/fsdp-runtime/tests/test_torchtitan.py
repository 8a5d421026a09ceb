"""torchtitan's own Trainer on models that we have sharded, next to FSDP2 in the same trainer.

torchtitan takes CUDA where there is no accelerator. The tests tell it, before they import the rest of it, that its
device is the CPU, and give it the ranks' process group.
"""

import dataclasses
import gc
import importlib
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import example_script, with_examples
from torch.distributed.fsdp import FSDPModule as AnyFSDPModule
from torch.distributed.tensor import DTensor, Replicate

from fsdp_runtime import FSDPModule, block_policies
from fsdp_runtime.integrations import torchtitan as ours
from ragged_shard.testing import on_ranks, run_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed (the extra `torchtitan`)")
# torchtitan's package of kernels imports it, also where none is used
pytest.importorskip("triton", reason="triton is not installed, which torchtitan imports")


CPU = SimpleNamespace(  # torch.cpu, with what torchtitan asks of torch.cuda
    **{
        **vars(torch.cpu),
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 30),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
)


def on_cpu():
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank)
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", CPU
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as of_groups
    from torchtitan.trainer import Trainer

    if not hasattr(
        dist, "set_timeout"
    ):  # torch 2.13 and before, with which Trainer.train stops after one step
        of_groups.set_pg_timeouts = lambda **named: None

    class OnCpu(Trainer):
        def init_distributed(self):
            return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

        def __init__(self, config):
            super().__init__(config)
            gc.enable()  # which torchtitan switched off
            self.seen: list[float] = []
            self.metrics_processor.should_log = lambda step: True
            self.metrics_processor.log = lambda step, loss, largest, norm, **_: self.seen.extend([loss, norm])

        def steps(self, count):
            """Losses and gradient norms of so many steps."""
            batches, self.seen = self.batch_generator(self.dataloader), []
            for _ in range(count):
                self.step += 1
                self.train_step(batches)
            return self.seen

    return OnCpu


def spec_of(name, system, **options):
    """torchtitan's debug model with two layers, attention of torch, and its function to shard it."""
    on_cpu()
    from torchtitan.models.common.attention import ScaledDotProductAttention

    flavor = "debugmodel" if name == "llama3" else "debugmodel_moe"
    spec = importlib.import_module(f"torchtitan.models.{name}").model_registry(flavor, attn_backend="varlen")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    theirs = spec.parallelize_fn

    def summed(model, **named):  # gloo has no reductions with a factor, which torch takes for one of 1.0 too
        for module in theirs(model, **named).modules():
            if isinstance(module, AnyFSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = {"ours": ours.parallelize_fn(theirs, **options), "fsdp2": summed}.get(
        system, theirs
    )
    return spec


def batches_of():
    from torchtitan.components.dataloader import BaseDataLoader

    class Batches(BaseDataLoader):
        """Rows that do not depend on how many ranks share them."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config): ...

        def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
            self.rows = range(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
            self.length, self.step = seq_len + 1, 0

        def __iter__(self):
            while True:
                drawn = [torch.Generator().manual_seed(100 * self.step + row) for row in self.rows]
                text = torch.stack([torch.randint(64, (self.length,), generator=g) for g in drawn])
                self.step += 1
                yield {"input": text[:, :-1]}, text[:, 1:].contiguous()

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, state_dict):
            self.step = state_dict["step"]

    return Batches.Config()


def trainer_of(folder, spec, *, rows=2, accumulate=1, training=None, parallelism=None, seed=0, **options):
    from tokenizers import Tokenizer, models
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig

    make = on_cpu()
    assets = folder / str(dist.get_rank())
    assets.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel({"a": 0})).save(str(assets / "tokenizer.json"))
    degree = dist.get_world_size() // (parallelism or {}).get("tensor_parallel_degree", 1)
    settings = {
        "local_batch_size": rows, "global_batch_size": rows * degree * accumulate, "seq_len": 8, "steps": 8,
        "disable_cuda_graphs": True, "mixed_precision_param": "float32", **(training or {}),
    }  # fmt: skip
    return make(
        make.Config(
            model_spec=spec,
            hf_assets_path=str(assets),
            dump_folder=str(folder),
            dataloader=batches_of(),
            optimizer=default_adamw(lr=1e-3),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
            training=TrainingConfig(**settings),
            parallelism=ParallelismConfig(**{"spmd_backend": "partial_dtensor", **(parallelism or {})}),
            debug=DebugConfig(seed=seed),
            **{"loss": CrossEntropyLoss.Config(), "activation_checkpoint": None, **options},
        )
    )


def set_weights(trainer):
    """The same values whatever shards them, which torch's random ops on DTensors do not give."""
    for index, (name, param) in enumerate(sorted(trainer.model_parts[0].named_parameters())):
        value = torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) * 0.05
        value = torch.ones(param.shape) if "norm" in name else value
        mesh = param.device_mesh
        with torch.no_grad():
            param.copy_(DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False))
    return trainer


def compared(folder, name, case):
    """Losses and norms of both systems from the same weights."""
    found = {}
    for system in ("fsdp2", "ours"):
        trainer = set_weights(trainer_of(folder, spec_of(name, system), **case))
        assert (FSDPModule in type(trainer.model_parts[0]).__mro__) == (system == "ours")
        found[system] = trainer.steps(3)
    return found["ours"], found["fsdp2"]


def dense_cases():
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.distributed.activation_checkpoint import FullAC

    chunked = ChunkedLossWrapper.Config(num_chunks=2, loss_fn=CrossEntropyLoss.Config())
    return [
        {},
        {"accumulate": 2, "training": {"max_norm": 0.1}},
        {"parallelism": {"fsdp_reshard_after_forward": "never"}, "loss": chunked},
        {"parallelism": {"fsdp_reshard_after_forward": "always"}, "activation_checkpoint": FullAC.Config()},
    ]


@on_ranks(2)
def test_losses_and_norms_of_a_llama_are_fsdp2s_with_every_policy_of_torchtitan(tmp_path):
    on_cpu()
    for case in dense_cases():
        mine, theirs = compared(tmp_path, "llama3", case)
        assert mine == pytest.approx(theirs, rel=1e-5), case
        if not case:  # FSDP2 pins memory, which needs an accelerator
            offload = {"training": {"enable_cpu_offload": True}}
            trainer = set_weights(trainer_of(tmp_path, spec_of("llama3", "ours"), **offload))
            assert trainer.steps(3) == mine
    mine, theirs = compared(tmp_path, "llama3", {"training": {"mixed_precision_param": "bfloat16"}})
    assert mine == pytest.approx(theirs, rel=2e-2)


def one_process(folder):
    return trainer_of(folder, spec_of("llama3", "fsdp2"), rows=4).steps(3)


def without_division(folder, backend):
    return trainer_of(folder, spec_of("llama3", "ours"), parallelism={"spmd_backend": backend}).steps(3)


def test_initial_weights_losses_and_gradients_are_those_of_one_process(tmp_path):
    (expected,) = run_ranks(1, one_process, tmp_path)
    for backend in ("partial_dtensor", "spmd_types"):
        for found in run_ranks(2, without_division, tmp_path, backend):
            assert found[::2] == pytest.approx(expected[::2], rel=1e-5)
            assert found[1::2] == pytest.approx(
                expected[1::2], rel=5e-4
            )  # torch adds whole tensors' squares in fp32


@on_ranks(4)
def test_tensor_parallelism_and_experts_with_replicas_train_as_with_fsdp2(tmp_path):
    for name, parallelism, close in (
        ("llama3", {"tensor_parallel_degree": 2}, 1e-5),
        ("qwen3", {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2}, 2e-3),  # routing jumps
    ):
        mine, theirs = compared(tmp_path, name, {"parallelism": parallelism})
        assert mine[:2] == pytest.approx(theirs[:2], rel=1e-5), name
        assert mine == pytest.approx(theirs, rel=close), name


def nothing(model, *, parallel_dims):
    return model


@on_ranks(2)
def test_options_reach_every_unit_the_name_is_put_back_and_the_rest_is_refused(tmp_path):
    from torch.distributed.fsdp import fully_shard as of_torch

    on_cpu()
    import torchtitan.distributed.fsdp as shared
    from torchtitan.distributed import ParallelDims

    trainer = trainer_of(tmp_path, spec_of("llama3", "ours", block_policy=block_policies.whole()))
    weight = trainer.model_parts[0].layers["0"].feed_forward.w1.weight
    assert sorted(weight.placements[0].local_units) == [0, 1]
    assert shared.fully_shard is of_torch
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "world_size": 2}
    for change, backend, message in (
        ({"dp_shard": 2}, "full_dtensor", '"full_dtensor"'),
        ({"pp": 2}, None, "pipeline_parallel_degree is more than 1"),
        ({"cp": 2}, None, "context_parallel_degree is more than 1"),
        ({"tp": 2}, "spmd_types", '"spmd_types" with tensor or expert'),
        ({"tp": 2}, "partial_dtensor", "nothing returned a Linear without sharding it"),
    ):
        dims = ParallelDims(**{**degrees, **change})
        if backend:
            dims.spmd_backend = backend
        with pytest.raises(ValueError, match=message):
            ours.parallelize_fn(nothing)(torch.nn.Linear(2, 2), parallel_dims=dims)
    assert shared.fully_shard is of_torch


@with_examples
@on_ranks(2)
def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path):
    make = on_cpu()
    script = example_script("train_torchtitan")
    assets = tmp_path / str(dist.get_rank())
    assets.mkdir()
    seen = []
    for steps in (4, 8):
        model = spec_of("llama3", "none")
        trainer = script.trainer(model, str(tmp_path), str(assets), steps, make)
        trainer.train()
        seen.append(trainer.seen)
        trainer.close()
    assert [len(each) for each in seen] == [8, 8]  # the second one went on after 4 steps
    assert seen[1][-2] < seen[0][0]

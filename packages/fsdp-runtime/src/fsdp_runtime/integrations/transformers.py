"""transformers: a mixin for its `Trainer`.

    class MyTrainer(RaggedTrainer, Trainer): ...

    args = TrainingArguments(..., fsdp=True, fsdp_config={...})       as for FSDP2
    trainer = MyTrainer(model, args, ..., shard_options={"block_policy": block_policies.rows(32)})
    trainer.train(resume_from_checkpoint=...)                         sharded and full checkpoints

Tried with transformers 5.23 and accelerate 1.15.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fsdp_runtime import FSDPModule
from fsdp_runtime.integrations import accelerate

_Trainer: Any = object  # the class after the mixin, whose attributes it uses


class RaggedTrainer(_Trainer):
    """Mix it in before transformers' `Trainer`: with `fsdp=True` the model is sharded by fsdp_runtime.

    `integrations.accelerate.shard` does so with the trainer's `fsdp_config`, before the optimizer is made or the first
    evaluation, which may come before training. Without `fsdp` the mixin changes nothing.
    """

    def __init__(self, *args: Any, shard_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """`Trainer`'s arguments, and `shard_options`: further arguments of `fully_shard`."""
        self.shard_options = dict(shard_options or {})
        self._own_params: list[list[nn.Parameter]] = []
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The trainer's optimizer, over the sharded model."""
        self._shard()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves some gathered
        optimizer = super().create_optimizer(model)
        self._own_params = [list(group["params"]) for group in optimizer.param_groups]
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The trainer's scheduler. Restores the optimizer's parameters first; see `accelerate.prepare`."""
        if self._sharded:
            for group, params in zip(self.optimizer.param_groups, self._own_params, strict=True):
                group["params"] = params
        return super().create_scheduler(num_training_steps, optimizer)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's loop, also before training, for which Accelerate's FSDP2 requires an optimizer."""
        self._shard()
        with accelerate.replaced(self, is_fsdp_enabled=False):  # so that the model alone is prepared
            return super().evaluation_loop(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with accelerate.full_state_dicts():
            return super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with accelerate.full_state_dicts():
            return super()._load_optimizer_and_scheduler(*args, **kwargs)

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        with accelerate.full_state_dicts():
            return super()._load_best_model(*args, **kwargs)

    @property
    def _sharded(self) -> bool:
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return self.is_fsdp_enabled and isinstance(model, FSDPModule)

    def _shard(self) -> None:
        if self.is_fsdp_enabled and not self._sharded:
            mesh = getattr(self.accelerator, "torch_device_mesh", None)
            if mesh is not None:
                mesh = mesh[tuple(self.accelerator.parallelism_config.fsdp_dim_names)]
            accelerate.shard(self.model, self.accelerator.state.fsdp_plugin, mesh, **self.shard_options)

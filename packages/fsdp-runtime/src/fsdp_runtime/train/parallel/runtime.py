"""fsdp_runtime where ranks share more than parameters: the adapter of `--hsdp`, `--tp`, `--pp`, `--cp` and `--ep`.

meta model -> parallelize (tp, cp, ep) -> this rank's stages (pp) -> fully_shard on each layer and stage -> values
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from fsdp_runtime import FSDPModule, clip_grad_norm_
from fsdp_runtime.token_loss import TokenLoss, count_tokens

from ..config import RunConfig
from ..model import Transformer
from ..systems import Batch, Initialise, MakeOptimizer, Runtime
from .meshes import Meshes
from .pipeline import Pipeline
from .tensor_parallel import parallelize


class SplitRuntime(Runtime):
    """One rank of a run with splits."""

    def __init__(self, config: RunConfig, device: torch.device, meshes: Meshes) -> None:
        super().__init__(config, device, meshes.shard_mesh)
        self.meshes, self.splits = meshes, meshes.splits
        self.readers = self.splits.readers * self.splits.cp
        self.stages: list[nn.Module] = []
        self._pipeline: Pipeline | None = None

    def build(
        self, model: nn.Module, initialise: Initialise | None, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Divide, shard and initialize. The returned model has this rank's layers, named as in the whole."""
        model = self.divide(model)
        for stage in self.stages:
            self.materialise(stage, initialise)
        if self.splits.pp > 1:
            self._pipeline = Pipeline(self.config, self.device, self.meshes, self.stages)
        return model, make_optimizer(model)

    def divide(self, model: nn.Module) -> nn.Module:
        """Cut matrices and layers; sets `stages`. Returns the model with this rank's layers."""
        self.stages = [model]
        if self.splits.plain or not isinstance(model, Transformer):
            return model
        if experts := parallelize(model, self.meshes, self.config.seq_len):
            mesh = self.meshes.expert_shard_mesh
            self.options["shard_placement_fn"] = lambda param: mesh if param in experts else None
        if self.splits.pp == 1:
            return model
        numbers = self.splits.stages_of(self.meshes.rank_of("pp"))
        parts = [self.splits.layers_of(number, model.config.num_layers) for number in numbers]
        part_of_rank = model.stage(*parts)
        self.stages = [part_of_rank.stage(part) for part in parts]
        return part_of_rank

    def shard(self, model: nn.Module) -> None:
        """`fully_shard` on each layer and stage. Experts' gradients are divided by the number of losses, too."""
        super().shard(model)
        if "shard_placement_fn" in self.options:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(self.readers)

    def roots(self, model: nn.Module) -> list[nn.Module]:
        """The stages."""
        return self.stages

    def average_over_tokens(self, model: nn.Module) -> None:
        """See `System`. Stages of a pipeline share the count, which its last one uses."""
        ways: dict[str, Any] = {}
        if self._pipeline is not None:
            ways = {"pp_mesh": self._pipeline.mesh, "schedule": self._pipeline.schedule}
        self.token_loss = TokenLoss(self.stages, mesh=self.meshes.shard_mesh, **ways)

    def accumulate(self, model: nn.Module, batches: list[Batch], aux_weight: float) -> Tensor:
        """Forward and backward. In a pipeline the last stage returns the losses, times its ranks; the others 0."""
        with self._loss_parallel():
            if self._pipeline is None:
                # Ranks of tp see the same loss, and balance their own share of the positions.
                return super().accumulate(model, batches, aux_weight / self.splits.tp)
            if self.token_loss is None:
                return self._pipeline.train(batches)
            step = self.token_loss.step(count_tokens(targets) for _, targets in batches)
            self.tokens = step.total
            return self.readers * self._pipeline.train(batches, step)

    def evaluate(self, model: nn.Module, batches: list[Batch]) -> Tensor:
        """Sum of the losses; in a pipeline on the last stage, times its ranks."""
        with self._loss_parallel():
            if self._pipeline is None:
                return super().evaluate(model, batches)
            return self._pipeline.evaluate(batches, *self.reduction)

    def _loss_parallel(self) -> AbstractContextManager[None]:
        return loss_parallel() if self.splits.tp > 1 else nullcontext()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[Tensor], None]
    ) -> Tensor:
        """Clip by the norm over all meshes and stages, step, and clear."""
        pp_mesh = None if self._pipeline is None else self._pipeline.mesh
        limit = self.config.clip or float("inf")
        norm = clip_grad_norm_(model.parameters(), limit, pp_mesh=pp_mesh)
        step(norm)
        optimizer.zero_grad(set_to_none=True)
        return norm

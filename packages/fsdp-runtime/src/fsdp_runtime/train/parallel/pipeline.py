# ruff: noqa: N803, N806  (capitals are dimensions)
"""Stages of the model on several ranks: a schedule of torch.distributed.pipelining, and the losses that it finds."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from fsdp_runtime.token_loss import TokenStep

from ..config import RunConfig
from ..model import losses_from
from ..splits import SCHEDULES
from ..systems import Batch
from .meshes import Meshes


class Pipeline:
    """This rank's stages under a schedule of torch.distributed.pipelining; microbatches are those of `accumulate`."""

    def __init__(
        self, config: RunConfig, device: torch.device, meshes: Meshes, modules: list[nn.Module]
    ) -> None:
        splits = meshes.splits
        assert meshes.batches is not None
        self.config, self.splits, self.device = config, splits, device
        self.mesh = meshes.batches["pp"]
        self.group = self.mesh.get_group()
        self.modules, self.numbers = modules, splits.stages_of(meshes.rank_of("pp"))
        stages = [
            pipelining.PipelineStage(module, number, splits.stages, device, group=self.group)
            for module, number in zip(modules, self.numbers, strict=True)
        ]
        per_rank, _, kind = SCHEDULES[splits.schedule]
        self._seen: list[Tensor] = []
        self._here = torch.empty(0)  # from a stage to the next one of the same rank
        self._step: TokenStep | None = None
        self.schedule: Any = getattr(pipelining, kind)(
            stages[0] if per_rank == 1 else stages, config.accumulate, loss_fn=self._loss, scale_grads=False
        )

    def train(self, batches: list[Batch], step: TokenStep | None = None) -> Tensor:
        """Forward and backward of all microbatches; the mean loss, times the pipeline's ranks, where it is known.

        With `step` the loss is this rank's part of the mean over the tokens of all ranks.
        """
        self._seen.clear()
        self._step = step
        tokens, targets = (torch.cat(part) for part in zip(*batches, strict=True))
        self.schedule.step(
            *((tokens,) if 0 in self.numbers else ()),
            **({"target": targets} if self.splits.stages - 1 in self.numbers else {}),
            return_outputs=False,
        )
        if not self._seen:
            return torch.zeros((), device=self.device)
        # Before the first step the schedule has run the loss once to learn shapes.
        losses = torch.stack(self._seen[-len(batches) :])
        return self.splits.pp * losses.sum()

    def evaluate(self, batches: list[Batch], reduction: str = "mean") -> Tensor:
        """The sum of the microbatches' losses, each reduced over its tokens, times the pipeline's ranks, where known.

        Microbatch by microbatch: torch's schedules in which stages come back to a rank do not run forward alone.
        """
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for tokens, targets in batches:
            for module, number in zip(self.modules, self.numbers, strict=True):
                out = module(tokens if number == 0 else self._received(tokens.shape[0], number))[0]
                if number == self.splits.stages - 1:
                    total += self.splits.pp * losses_from((out, None), targets, reduction)[0]
                else:
                    self._send(out, number)
        return total

    def _received(self, rows: int, number: int) -> Tensor:
        """Receive the activations of the previous stage."""
        before = self.splits.rank_of_stage(number - 1)
        if before == self.splits.rank_of_stage(number):
            return self._here
        config, dtype = self.config, torch.bfloat16 if self.config.precision == "bf16" else torch.float32
        shape = rows, config.seq_len // self.splits.slices, config.model.dim
        x_BTD = torch.empty(shape, device=self.device, dtype=dtype)
        dist.recv(x_BTD, group=self.group, group_src=before)
        return x_BTD

    def _send(self, x_BTD: Tensor, number: int) -> None:
        after = self.splits.rank_of_stage(number + 1)
        if after == self.splits.rank_of_stage(number):
            self._here = x_BTD
        else:
            dist.send(x_BTD.contiguous(), group=self.group, group_dst=after)

    def _loss(self, out: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        config, splits, step = self.config, self.splits, self._step
        cross_entropy, aux = losses_from(out, targets, "mean" if step is None else "sum")
        cross_entropy = cross_entropy / config.accumulate if step is None else step.loss(cross_entropy)
        self._seen.append(cross_entropy.detach())
        # Of the balancing loss, a mean over sequences.
        parts = config.accumulate * (1 if step is None else splits.readers * splits.cp)
        return cross_entropy + config.model.aux_weight / splits.tp / parts * aux

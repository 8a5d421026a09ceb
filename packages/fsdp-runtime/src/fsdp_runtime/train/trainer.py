"""The training loop: one run on one rank, from configuration to the last checkpoint.

    set up (all ranks agree or all raise) -> [ batch -> forward, backward -> clip, step -> figures ] -> save -> leave

One small all-reduce per step carries the loss and a flag, "asked to stop", and is read one step later: so ranks stop
at the same step, and the host waits neither for the flag nor for the device.
"""

import contextlib
import dataclasses
import math
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ragged_shard.device import device_layer, is_cpu
from ragged_shard.dist import gather_from_ranks

from .checkpoint import check_same_run, latest, load, save
from .config import RunConfig, step_range
from .data import Batches, TextData, read_data
from .errors import TrainError, agreed, check_agreement
from .hardware import memory_mb, own_device, to_device
from .model import Transformer, init_parameter, losses_of
from .optimizers import make_optimizer, optimizer_spec
from .report import CURVES, METRICS, Report, draw_curves, profile_of, read_metrics
from .systems import make_mesh, make_system


def check_finite(step: int, loss: float, norm: float) -> None:
    """Raise `TrainError` if a step's loss or its gradients' norm, over all ranks, is not finite; steps count from 1."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainError(
            f"step {step}: the loss is {loss:.4g} and the gradients' norm {norm:.4g}; try a lower --lr, a longer "
            "--warmup or --clip"
        )


@dataclass
class _Sums:
    """Figures of a step: reduced over ranks, not yet read."""

    step: int
    figures: Tensor  # loss, norm, stop, CPU seconds, memory; on the host once `copied`
    copied: Any  # an event
    lr: float


class Trainer:
    """One rank of a run. `torch.distributed` is initialised, except for a run in one process without it.

    `out` is the run's folder, the same on every rank; `stop` is called at every step and returns the number of a stop
    signal, or 0. Raises `TrainError`, on every rank, if options do not fit together, or data or a checkpoint cannot be
    read.
    """

    def __init__(
        self, config: RunConfig, out: Path, *, quiet: bool = False, stop: Callable[[], int] = lambda: 0
    ) -> None:
        self.config, self.out, self.stop, self.quiet = config, out, stop, quiet
        distributed = dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        config.check(self.world_size)
        self.device = own_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
        with agreed("reading the data"):
            self.data = data_of(config)
        sizes = config.seq_len, config.batch, config.accumulate, self.rank, self.world_size
        self.batches = Batches(self.data.train, *sizes, config.seed, self.data.vocab_size)
        self.held_out = dataclasses.replace(self.batches, corpus=self.data.held_out, seed=12345)
        check_agreement({"--data (a digest of names and sizes)": self.data.identity})
        mesh = make_mesh(config.hsdp, self.device.type, timedelta(seconds=config.timeout))
        self.system = make_system(config, self.device, mesh)
        self.model, self.optimizer = self._build()
        self.step = 0
        self._saved: int | None = None  # step of the newest checkpoint
        self._last_held_out: float | None = None
        self._last_entry: dict[str, Any] = {}
        self._clock = self._lap = (0.0, 0.0)  # wall and CPU seconds of the last step
        self._unread: _Sums | None = None  # figures of the last step
        self._stopped = False  # whether a rank was asked to stop
        if config.resume:
            self._resume()

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        config = self.config

        sizes = dataclasses.replace(config.model, vocab_size=self.data.vocab_size)
        with torch.device("meta"):
            skeleton = Transformer(sizes, checkpointing=config.checkpointing)
        self._num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())

        def initialise(name: str, value: Tensor) -> None:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed}/{name}".encode()))
            init_parameter(sizes, name, value, generator)

        optimizer_of = partial(
            make_optimizer, config.optimizer, lr=config.lr, weight_decay=config.weight_decay
        )
        return self.system.build(skeleton, initialise, optimizer_of)

    def _resume(self) -> None:
        checkpoint = gather_from_ranks(latest(self.out))[0]
        if checkpoint is None:
            raise TrainError(f"--resume: {self.out} has no complete checkpoint")
        with agreed("resuming"):
            self.step = self._saved = check_same_run(checkpoint, self.config, self.data.identity)
        decay = [group.get("weight_decay") for group in self.optimizer.param_groups]
        load(checkpoint, self.model, self.optimizer)
        for group, value in zip(self.optimizer.param_groups, decay, strict=True):  # --weight-decay may change
            if value is not None:
                group["weight_decay"] = value

    def run(self) -> dict[str, Any]:
        """Train to the last step, or until asked to stop; save; return a summary (the same on every rank but times).

        Raises `TrainError` if a save failed, or the loss is not finite.
        """
        config, first, begun = self.config, self.step, time.perf_counter()
        with agreed("opening the metrics"):
            report = Report(self.out, first, config.steps, quiet=self.quiet) if self.rank == 0 else None
        profile: Any = contextlib.nullcontext()
        if config.profile:
            path = self.out / f"trace-rank-{self.rank}.json"
            profile = profile_of(step_range(config.profile), first, path)
        with contextlib.closing(report) if report else contextlib.nullcontext(), profile as tracer:
            if report:
                report.say(self._headline())
            if first == 0 and config.eval_every:
                self._held_out(report)
            self._train(report, tracer.step if tracer else lambda: None)
        summary = self._summary(first, time.perf_counter() - begun)
        if self.rank == 0 and config.plot and not summary["stopped"]:
            metrics = {config.optimizer: read_metrics(self.out / METRICS)}
            draw_curves(metrics, self.out / CURVES, self._headline())
        return summary

    def _train(self, report: Report | None, after_step: Callable[[], None]) -> None:
        """All steps that are left, or until a rank was asked to stop, with evaluations and saves."""
        config = self.config
        self._start_clock()
        while self.step < config.steps and not self._stopped:
            sums = self._train_step()
            after_step()
            now = time.perf_counter(), time.process_time()
            self._lap, self._clock = (now[0] - self._clock[0], now[1] - self._clock[1]), now
            self._read(report)
            self._unread = sums
            self.step += 1
            last = self.step == config.steps
            evaluates = config.eval_every and (last or self.step % config.eval_every == 0)
            saves = config.save_every and self.step % config.save_every == 0
            if evaluates or saves:  # a checkpoint must not contain an update with NaN
                self._read(report)
            if evaluates:
                self._held_out(report)
                self._start_clock()
            if saves:
                self._save()
        self._read(report)
        if config.save_every:
            self._save()
            if report:
                report.say(f"saved {latest(self.out)}")

    def _start_clock(self) -> None:
        if not is_cpu(self.device):
            torch.accelerator.synchronize(self.device)
        self._clock = time.perf_counter(), time.process_time()

    def _train_step(self) -> _Sums:
        """Forward and backward over this rank's microbatches, and the optimizer's step."""
        config = self.config
        peak = optimizer_spec(config.optimizer).lr if config.lr is None else config.lr
        lr = config.learning_rate(self.step, peak)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        torch.manual_seed(zlib.crc32(f"{config.seed}/{self.step}/{self.rank}".encode()))  # dropout, if any
        self.system.begin_step(self.model, self.step)
        self.model.train()
        batches = self.batches.microbatches(self.step, self.device)
        loss = self.system.accumulate(self.model, batches, config.model.aux_weight)
        norm = self.system.step(self.model, self.optimizer)
        local = [float(self.stop() > 0), self._lap[1], memory_mb(self.device)]
        figures = loss.double().view(1), norm.double().view(1) / self.world_size
        values = torch.cat((*figures, to_device(torch.tensor(local, dtype=torch.float64), self.device)))
        if self.world_size > 1:
            dist.all_reduce(values)  # an accelerator's stream does this; the host does not wait
        layer = device_layer(self.device)
        return _Sums(self.step, layer.to_host(values), layer.record(), lr)

    def _read(self, report: Report | None) -> None:
        """Record the figures of the last step, unless that is done."""
        if self._unread is None:
            return
        sums, self._unread, config = self._unread, None, self.config
        device_layer(self.device).wait_on_host(sums.copied)
        loss, norm, stop, cpu, memory = map(float, sums.figures)
        loss /= self.world_size
        self._stopped = self._stopped or stop > 0
        self._last_entry = {
            "step": sums.step,
            "loss": loss,
            "grad_norm": norm,
            "lr": sums.lr,
            "tokens_per_s": config.batch * config.seq_len / max(self._lap[0], 1e-9),
            "step_s": self._lap[0],
            "cpu_s": cpu,
            "memory_mb": memory / self.world_size,
        }
        if report:
            report.step(self._last_entry)
        check_finite(sums.step + 1, loss, norm)

    @torch.no_grad()
    def _held_out(self, report: Report | None) -> None:
        """Mean loss over the first held-out batches, which are the same at every call and world size. Collective."""
        self.model.eval()
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        count = min(self.config.eval_batches, max(1, self.held_out.num_windows // self.config.batch))
        for number in range(count):
            for tokens, targets in self.held_out.microbatches(number, self.device):
                with self.system.autocast():
                    total += losses_of(self.model, tokens, targets)[0].double()
        if self.world_size > 1:
            dist.all_reduce(total)
        self._last_held_out = float(total) / (count * self.config.accumulate * self.world_size)
        if report:
            report.held_out(self.step, self._last_held_out)

    def _save(self) -> None:
        """Save this step, unless that is done. Collective."""
        if self._saved == self.step:
            return
        about = {"config": self.config.to_json(), "data": self.data.identity, "step": self.step}
        save(self.out, self.model, self.optimizer, about, self.config.keep)
        self._saved = self.step

    def _summary(self, first: int, seconds: float) -> dict[str, Any]:
        stopped = self._stopped and self.step < self.config.steps
        received = torch.tensor(int(self.stop()), device=self.device)  # the signal
        if stopped and self.world_size > 1:
            dist.all_reduce(received, dist.ReduceOp.MAX)
        return {
            "out": str(self.out),
            "steps": self.step,
            "first_step": first,
            "stopped": stopped,
            "saved": self._saved == self.step,
            "stopped_by": int(received) if stopped else None,
            "loss": self._last_entry.get("loss"),
            "held_out_loss": self._last_held_out,
            "seconds": seconds,
        }

    def _headline(self) -> str:
        config = self.config
        return (
            f"{self._num_parameters / 1e6:.2f}M parameters, {config.system} on {self.world_size} {self.device.type} "
            f"ranks{f' (hsdp {config.hsdp})' if config.hsdp > 1 else ''}, {config.optimizer}, {config.precision}, "
            f"{config.batch} x {config.seq_len} tokens a step, {self.data.train.num_tokens / 1e6:.1f}M tokens of "
            f"{self.data.source}"
        )


def data_of(run: RunConfig) -> TextData:
    """Training and held-out text of a run."""
    return read_data(
        run.data, dtype=run.dtype, vocab_size=run.vocab_size, held_out=run.held_out, seq_len=run.seq_len
    )

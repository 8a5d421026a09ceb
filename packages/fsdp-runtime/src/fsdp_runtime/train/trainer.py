"""The training loop: one run on one rank, from configuration to the last checkpoint.

    set up (all ranks agree or all raise) -> [ batch -> forward, backward -> clip, step -> figures ] -> save -> leave

One small all-reduce per step carries the loss and two flags, "asked to stop" and "a save failed", and is read one
step later: so ranks stop at the same step, no rank waits for a flag, and the device is never waited for.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ragged_shard.device import device_layer

from . import checkpoint as ckpt
from .config import RunConfig
from .data import Batches, TextData, read_data
from .errors import TrainError, agreed, check_agreement, check_model, say
from .hardware import StepClock, copy_to_host, memory_mb, own_device, to_device
from .model import ModelConfig, Transformer, init_parameter
from .optimizers import make_optimizer, optimizer_spec
from .report import CURVES, METRICS, Report, draw_curves, read_metrics
from .systems import build_hf_model, make_mesh, make_system
from .tracing import profiling, step_range


def check_finite(step: int, loss: float, norm: float, ranks: int, rank: int) -> None:
    """Check a step's figures.

    Args:
        step: counted from 1.
        loss, norm: over all ranks.
        ranks: how many had such a loss themselves.
        rank: which, if it was one.

    Raises:
        TrainError: the loss or the gradients' norm is not finite.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    who = f"rank {rank}" if ranks == 1 else f"{ranks} ranks"
    what = f"the loss of {who} is {loss}" if ranks else f"the gradients' norm is {norm} (the loss {loss:.4g})"
    raise TrainError(f"step {step}: {what}; try a lower --lr, a longer --warmup or --clip")


@dataclass
class _Sums:
    """The figures of a step on their way: reduced over ranks, not yet read."""

    step: int
    # (loss, norm, ranks with a bad loss, sum of their numbers, stop, save failed, CPU seconds, memory)
    read: Callable[[], list[float]]
    work: Any  # to wait for first; None if `read` does
    lr: float


class Trainer:
    """One rank of a run. `torch.distributed` is initialised, except for a run in one process without it.

    Args:
        config: the run.
        out: its folder, the same on every rank.
        quiet: print nothing.
        stop: called at every step; returns the number of a stop signal, or 0.
        beat: called when a step, an evaluation or a save begins.

    Raises:
        TrainError: on every rank: what was asked for does not fit together, or cannot be read or written.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        *,
        quiet: bool = False,
        stop: Callable[[], int] = lambda: 0,
        beat: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self.config, self.out, self.stop, self.beat, self.quiet = config, out, stop, beat, quiet
        distributed = dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        config.check(self.world_size)
        self.device = own_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
        allowed = timedelta(seconds=config.timeout)
        with agreed("reading the data"):
            self.data = data_of(config)
            self.batches = self._batches(self.data, held_out=False)
            self.held_out = self._batches(self.data, held_out=True)
        check_agreement({"--data (a digest of names and sizes)": self.data.identity})
        self.system = make_system(config, self.device, make_mesh(config.hsdp, self.device.type, allowed))
        self.model, self.optimizer = self._build()
        check_model(self.model)
        self.group = (
            dist.new_group(backend="gloo", timeout=allowed) if distributed and config.save_every else None
        )
        self.checkpoints: ckpt.Checkpoints | None = None
        self.step = 0
        self._saved = -1
        self._last_held_out: float | None = None
        self._report: Report | None = None
        self._last_entry: dict[str, Any] = {}
        self._lap = (0.0, 0.0)  # wall and CPU seconds of the last step
        if config.resume:
            self._resume()
        if config.save_every:
            with agreed("making the run's folder"):
                self.checkpoints = ckpt.Checkpoints(out, config.keep, self.group, self.device)

    def _batches(self, data: TextData, *, held_out: bool) -> Batches:
        config = self.config
        corpus = data.held_out if held_out else data.train
        return Batches(
            corpus=corpus,
            seq_len=config.seq_len,
            batch=config.batch,
            accumulate=config.accumulate,
            rank=self.rank,
            world_size=self.world_size,
            seed=12345 if held_out else config.seed,
            vocab_size=data.vocab_size,
        )

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        config = self.config

        def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
            return make_optimizer(config.optimizer, model, lr=config.lr, weight_decay=config.weight_decay)

        if config.hf_config:
            model = build_hf_model(config.hf_config, config.seed, self.data.vocab_size, config.checkpointing)
            self._described = ckpt.describe(model)
            return self.system.build(model, None, optimizer_of)
        sizes = model_config(config, self.data.vocab_size)
        with torch.device("meta"):
            skeleton = Transformer(sizes, checkpointing=config.checkpointing)
        self._described = ckpt.describe(skeleton)

        def initialise(name: str, value: Tensor) -> None:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed}/{name}".encode()))
            init_parameter(sizes, name, value, generator)

        return self.system.build(skeleton, initialise, optimizer_of)

    def _about(self) -> dict[str, Any]:
        return {
            "config": self.config.to_json(),
            "identity": {"data": self.data.identity},
            "parameters": self._described,
            "vocab_size": self.data.vocab_size,
            "world_size": self.world_size,
        }

    def _resume(self) -> None:
        checkpoint, damaged = ckpt.newest_intact(self.out)
        if self.rank == 0 and not self.quiet:
            for line in damaged:
                say(f"{line}; going on from {checkpoint.name}")
        with agreed("resuming"):
            about = ckpt.read_about(checkpoint)
            ckpt.check_same_run(checkpoint, about, self.config, self.data.identity, self._described)
        decay = [group.get("weight_decay") for group in self.optimizer.param_groups]
        ckpt.load(checkpoint, self.model, self.optimizer, self.group)
        for group, value in zip(self.optimizer.param_groups, decay, strict=True):  # --weight-decay may change
            if value is not None:
                group["weight_decay"] = value
        self.step = int(about["step"])

    def run(self) -> dict[str, Any]:
        """Train to the last step, or until asked to stop; save; return a summary (the same on every rank but times).

        Raises:
            TrainError: a save failed, or the loss is not finite.
        """
        config = self.config
        first, begun = self.step, time.perf_counter()
        with agreed("opening the metrics"):
            report = Report(self.out, first, config.steps, quiet=self.quiet) if self.rank == 0 else None
        self._report = report
        clock, waiting = StepClock(self.device), None
        stopped = False
        options = config.profile, first, self.out / f"trace-rank-{self.rank}.json", self.device
        with report or contextlib.nullcontext(), profiling(*options) as profile:
            if report:
                report.say(self._headline())
                if config.profile and step_range(config.profile).start < first:
                    report.say(f"--profile {config.profile}: steps before {first} are done and not traced")
            if first == 0 and config.eval_every and config.steps:
                self._held_out(report)
            clock.lap(synchronize=True)
            while self.step < config.steps and not stopped:
                self.beat(f"step {self.step + 1}")
                sums = self._train_step()
                profile(self.step)
                self._lap = clock.lap()
                if waiting is not None:
                    stopped = self._read(waiting, report)
                waiting = sums
                self.step += 1
                boundary = self.step % config.eval_every == 0 if config.eval_every else False
                if (boundary or self.step == config.steps) and config.eval_every:
                    self._read(waiting, report)
                    waiting = None
                    self._held_out(report)
                    clock.lap(synchronize=True)
                if self.checkpoints and self.step % config.save_every == 0:
                    if waiting is not None:  # an update with NaN must not be saved
                        stopped, waiting = self._read(waiting, report), None
                    self._save(report)
            if waiting is not None:
                self._read(waiting, report)
            if self.checkpoints:
                self._save(report, last=True)
        summary = self._summary(stopped and self.step < config.steps, first, time.perf_counter() - begun)
        with agreed("drawing the curves"):
            if self.rank == 0 and config.plot and not summary["stopped"]:
                entries = read_metrics(self.out / METRICS)
                draw_curves({config.optimizer: entries}, self.out / CURVES, self._headline())
        if self.group is not None:  # `_give_up` has waited for every rank's last save
            dist.destroy_process_group(self.group)
            self.group = None
        return summary

    def _train_step(self) -> _Sums:
        """Forward and backward over this rank's microbatches, and the optimizer's step."""
        config = self.config
        peak = optimizer_spec(config.optimizer).lr if config.lr is None else config.lr
        lr = config.learning_rate(self.step, peak)
        set_learning_rate(self.optimizer, lr)
        torch.manual_seed(zlib.crc32(f"{config.seed}/{self.step}/{self.rank}".encode()))  # dropout, if any
        self.system.begin_step(self.model, self.step)
        self.model.train()
        batches = self.batches.microbatches(self.step, self.device)
        loss = self.system.accumulate(self.model, batches, config.model.aux_weight)
        norm = self.system.step(self.model, self.optimizer, self._optimizer_step)
        return self._reduce(loss, norm, lr)

    def _optimizer_step(self, norm: Tensor) -> None:
        step: Callable[..., Any] = self.optimizer.step
        if optimizer_spec(self.config.optimizer).takes_norm:
            step(grad_norm=norm)
        else:
            step()

    def _reduce(self, loss: Tensor, norm: Tensor, lr: float) -> _Sums:
        failed = bool(self._report and self._report.problem) or bool(
            self.checkpoints and self.checkpoints.failed()
        )
        flags = [float(self.stop() > 0), float(failed)]
        local = torch.tensor([*flags, self._lap[1], memory_mb(self.device)], dtype=torch.float64)
        bad = (~torch.isfinite(loss)).double().view(1)
        figures = (loss.double().view(1), norm.double().view(1) / self.world_size, bad, bad * self.rank)
        values = torch.cat((*figures, to_device(local, self.device)))
        work = dist.all_reduce(values, async_op=True) if self.world_size > 1 else None
        if work is not None and device_layer(self.device).asynchronous:
            work.wait()  # the stream's, ahead of what is queued next; on a CPU it would be this thread's
            work = None
        return _Sums(self.step, copy_to_host(values), work, lr)

    def _read(self, sums: _Sums, report: Report | None) -> bool:
        """Record a step's figures. Returns True, on every rank, if a rank was asked to stop."""
        if sums.work is not None:
            try:
                sums.work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"all_reduce of the figures of step {sums.step + 1} failed: {error}"
                ) from error
        loss, norm, bad, bad_rank, stop, failed, cpu, memory = sums.read()
        loss /= self.world_size
        config = self.config
        entry = {
            "step": sums.step,
            "loss": loss,
            "grad_norm": norm,
            "lr": sums.lr,
            "tokens_per_s": config.batch * config.seq_len / max(self._lap[0], 1e-9),
            "step_s": self._lap[0],
            "cpu_s": cpu,
            "memory_mb": memory / self.world_size,
            "epoch": self.batches.epoch(sums.step + 1),
        }
        self._last_entry = entry
        if report and (sums.step % config.log_every == 0 or sums.step + 1 == config.steps):
            report.step(entry)
        if failed:
            self._give_up()
        try:
            check_finite(sums.step + 1, loss, norm, int(bad), int(bad_rank))
        except TrainError:
            if self.checkpoints:
                self.checkpoints.finish()  # of an earlier step: those numbers were good
            raise
        return bool(stop > 0)

    def _give_up(self) -> None:
        """Raise on every rank what went wrong while writing on one of them. Collective."""
        with agreed("writing"):
            if self._report and self._report.problem:
                raise TrainError(self._report.problem)
            if self.checkpoints:
                self.checkpoints.finish()

    @torch.no_grad()
    def _held_out(self, report: Report | None) -> float:
        """Mean loss over the first held-out batches, which are the same at every call and world size. Collective."""
        self.beat("held-out evaluation")
        self.model.eval()
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        count = min(self.config.eval_batches, max(1, self.held_out.num_windows // self.config.batch))
        for number in range(count):
            batches = self.held_out.microbatches(number, self.device)
            total += self.system.evaluate(self.model, batches)
        if self.world_size > 1:
            dist.all_reduce(total)
        loss = float(total) / (count * self.config.accumulate * self.world_size)
        self._last_held_out = loss
        if report:
            report.held_out(self.step, loss)
        return loss

    def _save(self, report: Report | None, *, last: bool = False) -> None:
        """Finish the save under way and start one of this step; the last one is waited for. Collective."""
        assert self.checkpoints is not None
        self.beat(f"saving step {self.step}")
        with agreed("saving"):
            newest = self.checkpoints.finish()
        already = newest == self.step or (last and self._saved == self.step)
        if not already:
            self.checkpoints.start(self.step, self.model, self.optimizer, self._about())
            self._saved = self.step
        if last:
            self._give_up()
        if report and last:
            report.say(f"saved {ckpt.latest(self.out)}")

    def _summary(self, stopped: bool, first: int, seconds: float) -> dict[str, Any]:
        config, entry = self.config, self._last_entry
        return {
            "out": str(self.out),
            "system": config.system,
            "optimizer": config.optimizer,
            "world_size": self.world_size,
            "steps": self.step,
            "first_step": first,
            "stopped": stopped,
            "stopped_by": self._signal() if stopped else None,
            "loss": entry.get("loss"),
            "held_out_loss": self._last_held_out,
            "seconds": seconds,
            "memory_mb": entry.get("memory_mb", memory_mb(self.device)),
        }

    def _signal(self) -> int:
        """The signal that some rank was stopped by. Collective."""
        received = torch.tensor(int(self.stop()), device=self.device)
        if self.world_size > 1:
            dist.all_reduce(received, dist.ReduceOp.MAX)
        return int(received)

    def _headline(self) -> str:
        count = sum(math.prod(shape) for shape, _ in self._described.values())
        config = self.config
        ranks = (
            f"rank{'s' if self.world_size > 1 else ''}{f' (hsdp {config.hsdp})' if config.hsdp > 1 else ''}"
        )
        return (
            f"{count / 1e6:.2f}M parameters, {config.system} on {self.world_size} {self.device.type} {ranks}, "
            f"{config.optimizer}, {config.precision}, "
            f"{config.batch} x {config.seq_len} tokens a step, {self.data.train.num_tokens / 1e6:.1f}M tokens of "
            f"{self.data.source}"
        )


def data_of(config: RunConfig) -> TextData:
    """The data of a run."""
    return read_data(
        config.data,
        dtype=config.dtype,
        vocab_size=config.vocab_size,
        held_out=config.held_out,
        seq_len=config.seq_len,
    )


def model_config(config: RunConfig, vocab_size: int) -> ModelConfig:
    """The model's sizes, with the data's vocabulary."""
    return dataclasses.replace(config.model, vocab_size=vocab_size)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its learning rate; a group's ``lr_scale`` multiplies it."""
    for group in optimizer.param_groups:
        value = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value

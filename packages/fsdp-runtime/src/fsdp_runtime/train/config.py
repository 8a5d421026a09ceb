"""The options of a run: one frozen dataclass, filled from the command line, checked before anything starts."""

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ragged_shard.device import is_cpu

from .errors import TrainError
from .hardware import pick_device
from .model import PRESETS, ModelConfig
from .optimizers import optimizer_spec, parse_block_option

System = Literal["fsdp_runtime", "fsdp2", "ddp", "deepspeed", "one"]
SYSTEMS = get_args(System)
# Options that only fsdp_runtime has. Their defaults, and "none", change nothing.
_OURS = ("block", "quantize", "reduce", "hsdp")


def _option(default: Any, text: str, *, least: int | None = None) -> Any:
    """A field with a flag: its help, and the smallest value of a finite number."""
    return field(default=default, metadata={"help": text, "least": least})


@dataclass(frozen=True)
class RunConfig:
    """The options of a run. Each field except `model` is a flag of the command line."""

    model: ModelConfig = field(default_factory=lambda: PRESETS["small"])
    data: Sequence[str] = _option((), "files, folders or globs (default: Python's standard library)")
    held_out: Sequence[str] = _option((), "held-out files (default: a share of the data)")
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = _option("uint16", "type of .bin files")
    vocab_size: int | None = _option(None, "tokens are below this (default: 256 for text)")
    seq_len: int = _option(256, "tokens of a sequence", least=1)
    batch: int = _option(24, "sequences of a global batch, for any number of ranks", least=1)
    accumulate: int = _option(1, "microbatches of a batch", least=1)
    steps: int = _option(160, "optimizer steps", least=1)
    warmup: int = _option(20, "steps of linear warm-up; a cosine follows", least=0)
    optimizer: str = _option("adamw", "adamw, adamw8bit, muon, shampoo, soap or torch-adamw")
    lr: float | None = _option(None, "peak learning rate (default: depends on the optimizer)")
    min_lr: float = _option(0.1, "last learning rate, as a share of the peak", least=0)
    weight_decay: float = _option(0.1, "weight decay of matrices", least=0)
    clip: float = _option(1.0, "largest gradient norm; 0 does not clip", least=0)
    precision: Literal["fp32", "bf16"] = _option("fp32", "fp32 or bf16 (default: bf16 on GPUs, fp32 on CPU)")
    checkpointing: bool = _option(False, "recompute each block's activations in backward (default: no)")
    seed: int = _option(0, "seed of initial values and of the shuffle", least=0)
    system: System = _option("fsdp_runtime", "fsdp_runtime, fsdp2, ddp, deepspeed or one (no sharding)")  # noqa: RUF009
    block: str = _option("auto", "uncut blocks: auto (the optimizer's), none, rows:N, tile:RxC or whole")
    quantize: Literal["none", "fp8", "int8"] = _option(
        "none", "gather the layers' matrices as codes: none, fp8 (128x128 tiles) or int8 (1x256)"
    )
    reduce: Literal["none", "bf16", "int8"] = _option(
        "none", "reduce gradients as none (their dtype), bf16, or int8 codes (of matrices)"
    )
    reshard: bool = _option(True, "free gathered blocks between forward and backward (default: yes)")
    hsdp: int = _option(1, "copies of the sharded model, a set of ranks each", least=1)
    eval_every: int = _option(40, "steps between held-out losses; 0 for none", least=0)
    eval_batches: int = _option(4, "held-out batches", least=1)
    profile: str | None = _option(None, "torch profile of steps START:STOP (without STOP), such as 10:13")
    save_every: int = _option(100, "steps between checkpoints; 0 for none", least=0)
    keep: int = _option(2, "checkpoints kept", least=1)
    out: str | None = _option(None, "run's folder (default: next free runs/NNN; with --resume the newest)")
    resume: bool = _option(False, "resume at the newest checkpoint, its options as defaults (default: no)")
    plot: bool = _option(True, "draw curves at the end (default: yes)")
    device: str = _option("auto", "auto, cpu, cuda or another accelerator")
    timeout: float = _option(300.0, "seconds that a collective may take before the run ends")

    def check(self, world_size: int) -> None:
        """Raises `TrainError` for any mistake that is visible without data and without other ranks."""
        if world_size < 1:
            raise TrainError(f"--ranks {world_size}: expected at least 1")
        for option in _OPTIONS:
            value, least = getattr(self, option.name), option.metadata["least"]
            if None not in (least, value) and not least <= value < math.inf:
                expected = "at least 1" if least else "0 or more"
                raise TrainError(f"{flag_of(option.name)} {value}: expected {expected}")
            choices = get_args(option.type) if get_origin(option.type) is Literal else (value,)
            if value not in choices:
                raise TrainError(f"{flag_of(option.name)} {value!r}: expected one of {', '.join(choices)}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise TrainError(f"--lr {self.lr}: expected a positive number")
        if not 0 < self.timeout < 1e6:
            raise TrainError(f"--timeout {self.timeout:g}: expected seconds, more than 0")
        if self.profile and (last := step_range(self.profile)[-1]) >= self.steps:
            raise TrainError(f"--profile {self.profile}: --steps {self.steps} has no step {last}")
        optimizer_spec(self.optimizer)
        parse_block_option(self.block)
        if self.system == "one" and world_size > 1:
            raise TrainError(f"--system one trains in one process, not on {world_size} ranks: add --ranks 1")
        for name in _OURS if self.system != "fsdp_runtime" else ():
            if (value := getattr(self, name)) not in ("none", getattr(RunConfig, name)):
                raise TrainError(f"{flag_of(name)} {value}: only fsdp_runtime has it, not {self.system}")
        if self.system == "deepspeed" and (self.save_every or self.resume):
            raise TrainError("deepspeed is here for comparison and saves no checkpoints: add --save-every 0")
        pick_device(self.device)
        if not self.divides(world_size):
            raise TrainError(
                f"--hsdp {self.hsdp} copies must divide the ranks, and {world_size} ranks x {self.accumulate} "
                f"microbatches a global batch of {self.batch} sequences"
            )

    def divides(self, world_size: int) -> bool:
        """True if `--hsdp` divides this number of ranks, and ranks times microbatches the batch."""
        return world_size % self.hsdp == 0 and self.batch % (world_size * self.accumulate) == 0

    def learning_rate(self, step: int, peak: float) -> float:
        """Linear warm-up to `peak`, then a cosine down to ``min_lr * peak`` at the last step."""
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return peak * (self.min_lr + (1 - self.min_lr) * cosine)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for a checkpoint or another process. Paths are absolute: it may be read in another folder."""
        data, held_out = (
            [os.path.abspath(os.path.expanduser(path)) for path in paths]
            for paths in (self.data, self.held_out)
        )
        return {**dataclasses.asdict(self), "data": data, "held_out": held_out}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RunConfig":
        """The inverse of `to_json`; raises TypeError or ValueError for unknown options, or sizes that make no model."""
        return cls(**{**data, "model": ModelConfig(**data["model"])})


def step_range(text: str) -> range:
    """Steps of "START:STOP", without STOP; raises `TrainError` for another text, or no steps."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match and (steps := range(int(match[1]), int(match[2]))):
        return steps
    raise TrainError(f"--profile {text}: expected START:STOP with START before STOP, such as 10:13")


_OPTIONS = tuple(option for option in dataclasses.fields(RunConfig) if option.name != "model")
_NO_FLAGS = ("vocab_size", "rope_theta", "norm_eps")  # fields of the model
_SIZES = tuple(size for size in dataclasses.fields(ModelConfig) if size.name not in _NO_FLAGS)


def flag_of(name: str) -> str:
    """The flag of a field of `RunConfig` or `ModelConfig`."""
    return f"--{name.removeprefix('num_').replace('_', '-')}"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a `RunConfig`, and `--ranks`. Unused ones are None."""
    run = parser.add_argument_group("run")
    run.add_argument("--ranks", type=int, help="local ranks (default: all GPUs, else all CPU cores)")
    for option in _OPTIONS:
        text, default = option.metadata["help"], option.default
        if default not in (None, ()) and "default" not in text:
            text += f" (default: {default})"
        _add(run, option, text)
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=sorted(PRESETS), help="sizes (default: small)")
    for size in _SIZES:
        tied = size.name == "tied"
        _add(model, size, "use the embedding as head" if tied else f"instead of the preset's {size.name}")


def _add(group: Any, option: dataclasses.Field[Any], text: str) -> None:
    hint: Any = option.type
    kind: dict[str, Any] = {"type": next((t for t in (int, float) if t in (hint, *get_args(hint))), str)}
    if hint is bool:
        kind = {"action": argparse.BooleanOptionalAction}
    elif get_origin(hint) is Sequence:
        kind = {"nargs": "+", "metavar": "PATH"}
    group.add_argument(flag_of(option.name), dest=option.name, default=None, help=text, **kind)


def run_config(options: argparse.Namespace) -> RunConfig:
    """The run of parsed options."""
    values = _given(options, _OPTIONS)
    values.setdefault("precision", "fp32" if is_cpu(pick_device(values.get("device", "auto"))) else "bf16")
    return RunConfig(model=_model(options, PRESETS["small"]), **values)


def resumed_config(options: argparse.Namespace, run: Path, saved: RunConfig) -> RunConfig:
    """The options of a resumed run: its saved ones, replaced by those on the command line."""
    changes = {"profile": None, "model": _model(options, saved.model), **_given(options, _OPTIONS)}
    return dataclasses.replace(saved, **{**changes, "out": str(run), "resume": True})


def _given(options: argparse.Namespace, fields: Iterable[dataclasses.Field[Any]]) -> dict[str, Any]:
    """Values of those fields that are on the command line."""
    values = {option.name: getattr(options, option.name) for option in fields}
    return {name: value for name, value in values.items() if value is not None}


def _model(options: argparse.Namespace, default: ModelConfig) -> ModelConfig:
    preset = PRESETS[options.preset] if options.preset else default
    try:
        return dataclasses.replace(preset, **_given(options, _SIZES))
    except ValueError as error:
        raise TrainError(f"the model: {error}") from error

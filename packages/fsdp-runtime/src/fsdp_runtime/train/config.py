"""What a run is: one frozen dataclass, filled from the command line, checked before anything starts."""

import argparse
import dataclasses
import math
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragged_shard import is_cpu

from .bad_numbers import ON_NAN
from .budget import parse_bytes
from .errors import TrainError
from .hardware import DEVICES, check_present, pick_device
from .model import PRESETS, ModelConfig
from .optimizers import optimizer_spec, parse_block_option
from .splits import AXES, SCHEDULES, Splits, check_optimizer, check_splits, find_splits

FLOAT8 = ("fsdp_runtime_float8", "fsdp2_float8")  # torchao's float8 on the system before the underscore
SYSTEMS = ("fsdp_runtime", "fsdp2", *FLOAT8, "ddp", "deepspeed", "one")
PRECISIONS = ("fp32", "bf16")
QUANTIZED = ("none", "fp8", "int8")
REDUCED = ("none", "bf16", "int8")
COMPUTE = ("dequantize", "scaled")


@dataclass(frozen=True)
class RunConfig:
    """Everything that a rank needs to know."""

    model: ModelConfig = field(default_factory=lambda: PRESETS["small"])
    hf_config: str | None = None
    data: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    dtype: str = "uint16"
    vocab_size: int | None = None
    seq_len: int = 256
    batch: int = 24
    accumulate: int = 1
    steps: int = 160
    warmup: int = 20
    optimizer: str = "adamw"
    lr: float | None = None
    min_lr: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    on_nan: str = "stop"
    precision: str = "fp32"
    checkpointing: bool = False
    seed: int = 0
    system: str = "fsdp_runtime"
    block: str = "auto"
    quantize: str = "none"
    reduce: str = "none"
    compute: str = "dequantize"
    reshard: bool = True
    memory_budget: int | None = None
    hsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    pp_schedule: str = "1f1b"
    eval_every: int = 40
    eval_batches: int = 4
    log_every: int = 1
    save_every: int = 100
    keep: int = 2
    out: str | None = None
    resume: bool = False
    plot: bool = True
    device: str = "auto"
    measure: bool = False
    timeout: float = 300.0
    late: float = 60.0

    def check(self, world_size: int) -> None:
        """Raise `TrainError` for anything that can be told without data and without other ranks."""
        for name in ("seq_len", "batch", "accumulate", "steps", "log_every", "keep", "eval_batches"):
            if getattr(self, name) < 1:
                raise TrainError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        for name in ("warmup", "weight_decay", "clip", "eval_every", "save_every", "seed", "min_lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TrainError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected 0 or more")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise TrainError(f"--lr {self.lr}: expected a positive number")
        if not 0 < self.timeout < 1e6:
            raise TrainError(f"--timeout {self.timeout:g}: expected seconds, more than 0")
        if not 0 <= self.late < self.timeout:
            raise TrainError(
                f"--late {self.late:g}: expected seconds below --timeout {self.timeout:g}, or 0 for no reports"
            )
        for name, known in (
            ("system", SYSTEMS),
            ("precision", PRECISIONS),
            ("quantize", QUANTIZED),
            ("reduce", REDUCED),
            ("compute", COMPUTE),
            ("device", ("auto", *DEVICES)),
            ("on_nan", ON_NAN),
        ):
            if getattr(self, name) not in known:
                flag = f"--{name.replace('_', '-')}"
                raise TrainError(f"{flag} {getattr(self, name)!r}: expected one of {', '.join(known)}")
        optimizer_spec(self.optimizer)
        parse_block_option(self.block)
        if self.system == "one" and world_size > 1:
            raise TrainError(f"--system one trains in one process, not on {world_size} ranks: add --ranks 1")
        if self.block not in ("auto", "none") and self.system != "fsdp_runtime":
            raise TrainError(f"--block {self.block}: only fsdp_runtime respects blocks, not {self.system}")
        for name in ("quantize", "reduce"):
            if getattr(self, name) != "none" and self.system != "fsdp_runtime":
                raise TrainError(
                    f"--{name} {getattr(self, name)}: only fsdp_runtime has it, not {self.system}"
                )
        if self.compute == "scaled" and self.quantize != "fp8":
            raise TrainError(f"--compute scaled multiplies codes of --quantize fp8, not of {self.quantize}")
        if self.system in ("deepspeed", *FLOAT8) and (self.save_every or self.resume):
            raise TrainError(
                f"{self.system} is here for comparison and saves no checkpoints: add --save-every 0"
            )
        if self.system == "deepspeed" and self.on_nan == "skip":
            raise TrainError("--on-nan skip: deepspeed decides itself about updates")
        if self.memory_budget is not None:
            self._check_budget()
        check_present(self.device)
        if self.hf_config and not Path(self.hf_config).is_file():
            raise TrainError(f"--hf-config {self.hf_config}: no such file")
        splits = self.splits(world_size)
        self._check_division(splits)
        if not splits.plain:
            self._check_splits(splits)

    def _check_budget(self) -> None:
        for reason, found in (
            (f"only fsdp_runtime has it, not {self.system}", self.system != "fsdp_runtime"),
            ("it decides what --no-reshard does", not self.reshard),
            (f"not with --pp {self.pp}, whose stages are used in turns", self.pp > 1),
        ):
            if found:
                raise TrainError(f"--memory-budget {self.memory_budget}: {reason}")

    def divides(self, world_size: int) -> bool:
        """Whether the splits divide so many ranks, and those that read divide the batch."""
        try:
            return self.batch % (self.splits(world_size).readers * self.accumulate) == 0
        except TrainError:
            return False

    def _check_division(self, splits: Splits) -> None:
        """Raise, with what would fit, if the readers and microbatches do not divide the batch."""
        parts = splits.readers * self.accumulate
        if self.batch % parts == 0:
            return
        fits = [] if self.resume else [f"--batch {-(-self.batch // parts) * parts}"]  # a run keeps its batch
        fewer = [ranks for ranks in range(1, splits.world_size) if self.divides(ranks)]
        fits += [f"{fewer[-1]} ranks"] if fewer else []
        readers = f"{splits.readers} ranks" if splits.plain else f"{splits.readers} readers of {splits}"
        raise TrainError(
            f"a global batch of {self.batch} sequences does not divide by {readers} x {self.accumulate} microbatches: "
            f"use {' or '.join(fits) or 'another --accumulate'}"
        )

    def splits(self, world_size: int) -> Splits:
        """How the ranks are divided.

        Raises:
            TrainError: they cannot be.
        """
        return find_splits({axis: getattr(self, axis) for axis in AXES}, self.pp_schedule, world_size)

    def _check_splits(self, splits: Splits) -> None:
        """Raise for what does not go together with the splits."""
        asked = next(f"--{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1)
        if self.system != "fsdp_runtime":
            raise TrainError(f"{asked}: only fsdp_runtime has it here, not {self.system}")
        inside = [f"--{axis} {getattr(self, axis)}" for axis in AXES[1:] if getattr(self, axis) > 1]
        if self.hf_config and inside:
            raise TrainError(f"{inside[0]} knows the modules of the built-in model, not of --hf-config")
        if self.compute == "scaled" and splits.tp > 1:
            raise TrainError(
                f"--compute scaled: not with --tp {splits.tp}, which cuts the matrices; use dequantize"
            )
        if not self.hf_config:
            check_splits(splits, self.model, self.seq_len, self.accumulate)
            check_optimizer(self.optimizer, splits.tp, self.model)

    def learning_rate(self, step: int, peak: float) -> float:
        """Linear warm-up to `peak`, then a cosine down to ``min_lr * peak`` at the last step."""
        if step < self.warmup:
            return peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return peak * (self.min_lr + (1 - self.min_lr) * cosine)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for a checkpoint or another process. Paths are absolute: it may be read in another folder."""
        paths = {name: [_absolute(path) for path in getattr(self, name)] for name in ("data", "held_out")}
        hf_config = self.hf_config and _absolute(self.hf_config)
        return {**dataclasses.asdict(self), **paths, "hf_config": hf_config}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RunConfig":
        """The inverse of `to_json`.

        Raises:
            TypeError, ValueError: a value of another type, an unknown option, or sizes that make no model.
        """
        return cls(**{**_typed(cls, data), "model": ModelConfig(**_typed(ModelConfig, data["model"]))})


def _typed(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Values for the fields of a dataclass, from JSON; lists become tuples.

    Raises:
        TypeError: a value is not of its field's type, or there is no such field.
    """
    hints = {field_.name: field_.type for field_ in dataclasses.fields(kind)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    for name, value in values.items():
        if name not in hints or not _is_of(hints[name], value):
            raise TypeError(f"{name}={str(value)[:100]!r} is not an option of this version")
    return values


def _is_of(hint: Any, value: Any) -> bool:
    if hint == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if hint is ModelConfig:
        return isinstance(value, dict)
    kinds = typing.get_args(hint) or (hint,)
    return type(value) in kinds or (float in kinds and type(value) is int)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


# flag, field, type, help. Fields of the model come after; None as type is a switch.
_RUN_FLAGS: tuple[tuple[str, str, Any, str], ...] = (
    ("--hf-config", "hf_config", str, "build a transformers model from this config file instead"),
    ("--dtype", "dtype", str, "type of .bin token files"),
    ("--vocab-size", "vocab_size", int, "tokens are below this (default: 256 for text, else looked up)"),
    ("--seq-len", "seq_len", int, "tokens of a sequence"),
    ("--batch", "batch", int, "sequences of a global batch, whatever the number of ranks"),
    ("--accumulate", "accumulate", int, "microbatches of a batch"),
    ("--steps", "steps", int, "optimizer steps"),
    ("--warmup", "warmup", int, "steps of linear warm-up; a cosine follows"),
    ("--optimizer", "optimizer", str, "adamw, adamw8bit, muon, shampoo, soap or torch-adamw"),
    ("--lr", "lr", float, "peak learning rate (default: the optimizer's own)"),
    ("--min-lr", "min_lr", float, "last learning rate, as a share of the peak"),
    ("--weight-decay", "weight_decay", float, "of matrices"),
    ("--clip", "clip", float, "largest gradient norm; 0 does not clip"),
    (
        "--on-nan",
        "on_nan",
        str,
        "where a loss or gradient is not finite: stop, or skip the update (waits for the device at each step)",
    ),
    ("--precision", "precision", str, "fp32 or bf16 (default: bf16 on GPUs, fp32 on CPU)"),
    (
        "--checkpointing",
        "checkpointing",
        None,
        "recompute each block's activations in backward (default: no)",
    ),
    ("--reshard", "reshard", None, "free gathered blocks between forward and backward (default: yes)"),
    (
        "--memory-budget",
        "memory_budget",
        parse_bytes,
        "keep as many gathered between forward and backward as this allows on a rank, such as 8GiB",
    ),
    ("--seed", "seed", int, "of initial values and of the shuffle"),
    (
        "--system",
        "system",
        str,
        "fsdp_runtime, fsdp2, the same with torchao's float8 (_float8), ddp, deepspeed or one (no sharding)",
    ),
    (
        "--block",
        "block",
        str,
        "what may not be cut: auto (what the optimizer asks for), none, rows:N, tile:RxC, whole",
    ),
    (
        "--quantize",
        "quantize",
        str,
        "gather the layers' matrices as codes: none, fp8 (128x128 tiles) or int8 (1x256)",
    ),
    (
        "--reduce",
        "reduce",
        str,
        "gradients travel as: none (their own dtype), bf16, or int8 codes (of matrices)",
    ),
    (
        "--compute",
        "compute",
        str,
        "of quantized matrices: dequantize, or scaled (products of fp8 codes: Hopper GPUs; for numerics on CPU)",
    ),
    ("--hsdp", "hsdp", int, "copies of the sharded model, a set of ranks each"),
    ("--tp", "tp", int, "ranks that share each matrix (tensor and sequence parallel)"),
    ("--pp", "pp", int, "ranks that share the layers (pipeline); microbatches are those of --accumulate"),
    ("--cp", "cp", int, "ranks that share each sequence (context parallel)"),
    ("--ep", "ep", int, "ranks that share each layer's experts"),
    ("--pp-schedule", "pp_schedule", str, f"of the pipeline: {', '.join(SCHEDULES)}"),
    ("--eval-every", "eval_every", int, "steps between held-out losses; 0 for none"),
    ("--eval-batches", "eval_batches", int, "held-out batches"),
    ("--log-every", "log_every", int, "steps between lines of metrics"),
    ("--save-every", "save_every", int, "steps between checkpoints; 0 for none"),
    ("--keep", "keep", int, "checkpoints kept"),
    ("--out", "out", str, "folder of the run (default: the next free runs/NNN; with --resume the newest)"),
    (
        "--resume",
        "resume",
        None,
        "go on from the newest intact checkpoint of the run, with its options but for those given here (default: no)",
    ),
    ("--plot", "plot", None, "draw curves at the end (default: yes)"),
    ("--device", "device", str, f"auto, {' or '.join(DEVICES)}"),
    ("--timeout", "timeout", float, "seconds that a collective may take before the run ends"),
    (
        "--late",
        "late",
        float,
        "seconds without progress after which the collective and the ranks that are missing are named; 0 for never",
    ),
    ("--measure", "measure", None, "count the peak of live bytes, to compare with the plan's (default: no)"),
)
_MODEL_FLAGS: tuple[tuple[str, str, Any], ...] = (
    ("--dim", "dim", int),
    ("--layers", "num_layers", int),
    ("--heads", "num_heads", int),
    ("--kv-heads", "num_kv_heads", int),
    ("--ff-dim", "ff_dim", int),
    ("--experts", "num_experts", int),
    ("--top-k", "top_k", int),
    ("--aux-weight", "aux_weight", float),
)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options that make a `RunConfig`, and `--ranks`."""
    run = parser.add_argument_group("run")
    run.add_argument("--ranks", type=int, help="local ranks (default: all GPUs, else all CPU cores)")
    run.add_argument("--data", nargs="+", metavar="PATH", help="files, folders or globs")
    run.add_argument("--held-out", nargs="+", metavar="PATH", help="held-out files (default: a share)")
    defaults = RunConfig()
    for flag, name, kind, text in _RUN_FLAGS:
        if kind is None:
            run.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            default = getattr(defaults, name)
            shown = "" if default is None or "default" in text else f" (default: {default})"
            run.add_argument(flag, dest=name, type=kind, default=None, help=text + shown)
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=sorted(PRESETS), help="sizes (default: small)")
    for flag, name, kind in _MODEL_FLAGS:
        model.add_argument(flag, dest=name, type=kind, help=f"instead of the preset's {name}")
    model.add_argument("--tied", action=argparse.BooleanOptionalAction, default=None, help="head = embedding")


def run_config(options: argparse.Namespace) -> RunConfig:
    """The run that parsed options describe."""
    values = _given(options)
    check_present(values.get("device", "auto"))
    values.setdefault("precision", "fp32" if is_cpu(pick_device(values.get("device", "auto"))) else "bf16")
    sizes = _given_sizes(options)
    if sizes and options.hf_config:
        raise TrainError(f"{next(iter(sizes))}: sizes are those of --hf-config {options.hf_config}")
    return RunConfig(model=_model(options, PRESETS["small"]), **values)


# What a run may not change when it goes on, and why: options of the model come in addition.
_FIXED = {
    "optimizer": "its state is another's",
    "hf_config": "its weights are of another model",
    "seed": "the next batch would not be the next",
    "seq_len": "the next batch would not be the next",
    "batch": "the next batch would not be the next",
    "dtype": "its data would be read otherwise",
}


def resumed_config(options: argparse.Namespace, run: Path, saved: RunConfig) -> RunConfig:
    """The options of a run that goes on: its own, but for those that are given on the command line.

    Raises:
        TrainError: one is given that the run cannot change.
    """
    values = _given(options)
    if "hf_config" in values:
        values["hf_config"] = _absolute(values["hf_config"])
    for name, reason in _FIXED.items():
        if name in values and values[name] != getattr(saved, name):
            raise TrainError(
                f"--{name.replace('_', '-')} {values[name]}: the run in {run} has {getattr(saved, name)}, and {reason}"
            )
    sizes = _given_sizes(options)
    model = _model(options, saved.model) if sizes else saved.model
    for field_ in dataclasses.fields(ModelConfig):
        mine, theirs = getattr(model, field_.name), getattr(saved.model, field_.name)
        if mine != theirs:
            said = ", ".join(f"{flag} {value}" for flag, value in sizes.items())
            raise TrainError(f"{said}: {field_.name} is {mine}, the run in {run} has {theirs}")
    changes = {"measure": False, **values, "out": str(run), "resume": True}
    return dataclasses.replace(saved, **changes)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of `RunConfig` that the command line names, but for the model's."""
    values = {name: getattr(options, name) for _, name, _, _ in _RUN_FLAGS}
    values |= {name: tuple(getattr(options, name)) for name in ("data", "held_out") if getattr(options, name)}
    return {name: value for name, value in values.items() if value is not None}


def _given_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Options of the model that the command line names, by flag."""
    flags = {"--preset": options.preset, "--tied": options.tied}
    flags |= {flag: getattr(options, name) for flag, name, _ in _MODEL_FLAGS}
    return {flag: value for flag, value in flags.items() if value is not None}


def _model(options: argparse.Namespace, default: ModelConfig) -> ModelConfig:
    chosen = {n: getattr(options, n) for _, n, _ in _MODEL_FLAGS if getattr(options, n) is not None}
    if options.tied is not None:
        chosen["tied"] = options.tied
    try:
        return dataclasses.replace(PRESETS[options.preset] if options.preset else default, **chosen)
    except ValueError as error:
        raise TrainError(f"the model: {error}") from error

"""What is fuzzed: for each format a real file, how it is damaged, and who reads it."""

import contextlib
import json
import pickle
import shlex
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from train_helpers import newest, replace, text_folder, tiny, train

from checks.fuzz import Target, WrongError, captured, unclear
from checks.mutations import NASTY, damaged, damaged_json, damaged_text
from fsdp_runtime.checkpoint import convert_checkpoint, read_safetensors
from fsdp_runtime.checkpoint.files import Checkpoint
from fsdp_runtime.train import TrainError
from fsdp_runtime.train import __main__ as train_cli
from fsdp_runtime.train.checkpoint import check_files, check_same_run, read_about
from fsdp_runtime.train.config import RunConfig, resumed_config
from fsdp_runtime.train.data import Batches, read_data
from fsdp_runtime.train.errors import one_line
from fsdp_runtime.train.model import ModelConfig
from fsdp_runtime.train.report import METRICS, Report, losses, read_metrics
from layout_planner import Layout, Rows, TensorSpec, Tile, plan
from layout_planner._cli import main as plan_main
from layout_planner.checkpoints import read_checkpoint
from ragged_shard.testing import run_ranks

REFUSED = (ValueError, OSError)


@contextlib.contextmanager
def all_targets(folder: Path) -> Iterator[list[Target]]:
    """Every target, with its real files below `folder`. Nothing is started by a command line inside."""
    run = _real_run(folder)
    (folder / "here").mkdir()
    with _no_ranks(), contextlib.chdir(folder / "here"):  # command lines write files
        yield [
            *_layouts(), *_safetensors(folder), *_checkpoints(run), *_tokens(folder), *_commands(folder, run),
        ]  # fmt: skip


def _real_run(folder: Path) -> Path:
    """A finished run of two ranks, two checkpoints."""
    text_folder(folder)
    sizes = ModelConfig(dim=8, num_layers=1, num_heads=2, num_kv_heads=1, ff_dim=8)
    config = tiny(folder, model=sizes, steps=4, save_every=2, optimizer="torch-sgd")
    run_ranks(2, train, config, folder / "run")
    return folder / "run"


# ---- layouts


def _layouts() -> list[Target]:
    specs = [
        TensorSpec("a", (4, 8), Rows(2)),
        TensorSpec("b", (16,)),
        TensorSpec("c", (3, 5, 8), Tile(2, 8)),
        TensorSpec("d", (64, 64), Tile(8, 16)),
    ]
    texts = [plan(specs, ranks).to_json().encode() for ranks in (1, 2, 7)]

    def make(draw: Random) -> bytes:
        return damaged_text(draw, draw.choice(texts), texts)

    def read(given: Any) -> None:
        layout = Layout.from_json(given.decode(errors="replace"))
        if Layout.from_json(layout.to_json()) != layout:
            raise WrongError("another layout when read back")
        for spec in layout.tensors:
            ranges = [layout.local_range(spec.name, rank) for rank in range(min(8, layout.world_size))]
            if any(not 0 <= start <= stop <= spec.numel for start, stop in ranges):
                raise WrongError(f"ranges {ranges}")
        if layout.tensors and layout.padded_numel < layout.lower_bound:
            raise WrongError("below the lower bound")

    return [Target("layout JSON", make, read, (ValueError,))]


# ---- safetensors


def _safetensors(folder: Path) -> list[Target]:
    real = folder / "safetensors"
    real.mkdir()
    weights = {
        "layers.0.w": torch.arange(96.0).reshape(12, 8),
        "layers.1.w": torch.arange(96.0).reshape(12, 8).bfloat16(),
        "embed": torch.ones(16, 8, dtype=torch.int32),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }
    save_file(weights, real / "model.safetensors", metadata={"format": "pt"})
    one = (real / "model.safetensors").read_bytes()
    place = folder / "st"
    place.mkdir()

    def make(draw: Random) -> bytes:
        return _damaged_safetensors(draw, one)

    def read(given: Any) -> None:
        path = place / "one.safetensors"
        path.write_bytes(given)
        for name, tensor in Checkpoint(path).tensors.items():
            if tensor.nbytes > len(given):
                raise WrongError(f"{name} has {tensor.nbytes} bytes of a file of {len(given)}")
            tensor.clone()

    del weights["empty"]
    save_file(weights, real / "model.safetensors")
    planned = (real / "model.safetensors").read_bytes()

    def make_planned(draw: Random) -> bytes:
        return _damaged_safetensors(draw, planned)

    def read_shapes(given: Any) -> None:
        path = place / "shapes.safetensors"
        path.write_bytes(given)
        read_checkpoint(path)

    return [
        Target("safetensors header", make, read, REFUSED),
        Target("safetensors header, for a plan", make_planned, read_shapes, REFUSED),
        *_indexes(folder, weights),
        _fp8(folder),
    ]


def _damaged_safetensors(draw: Random, data: bytes) -> bytes:
    if draw.random() < 0.3:
        return damaged(draw, data, [data])
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length]
    changed = damaged_text(draw, header, [header])
    return struct.pack("<Q", len(changed)) + changed + data[8 + length :]


def _indexes(folder: Path, weights: dict[str, torch.Tensor]) -> list[Target]:
    place = folder / "indexed"
    place.mkdir()
    names = sorted(weights)
    files = {name: f"model-{1 + (number > 2)}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, place / file)
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": files}).encode()
    path = place / "model.safetensors.index.json"

    def make(draw: Random) -> bytes:
        return damaged_text(draw, index, [index])

    def read(given: Any) -> None:
        path.write_bytes(given)
        if set(Checkpoint(place).tensors) != set(json.loads(given)["weight_map"]):
            raise WrongError("not the tensors that the index lists")

    def read_shapes(given: Any) -> None:
        path.write_bytes(given)
        read_checkpoint(place)

    return [
        Target("safetensors index", make, read, REFUSED),
        Target("safetensors index, for a plan", make, read_shapes, REFUSED),
    ]


def _fp8(folder: Path) -> Target:
    """A folder with codes, scales and the config.json that says how large tiles are."""
    place = folder / "fp8"
    place.mkdir()
    tensors = {
        "w": torch.zeros(8, 16, dtype=torch.float8_e4m3fn),
        "w_scale_inv": torch.ones(2, 2),
        "b": torch.ones(3),
    }
    save_file(tensors, place / "model.safetensors")
    data = (place / "model.safetensors").read_bytes()
    config = json.dumps(
        {"quantization_config": {"weight_block_size": [4, 8], "quant_method": "fp8"}}
    ).encode()

    def make(draw: Random) -> tuple[bytes, bytes]:
        if draw.random() < 0.5:
            return _damaged_safetensors(draw, data), config
        return data, damaged_text(draw, config, [config])

    def read(given: Any) -> None:
        (place / "model.safetensors").write_bytes(given[0])
        (place / "config.json").write_bytes(given[1])
        read_safetensors(place)

    return Target("FP8 folder and its config.json", make, read, REFUSED)


# ---- checkpoints


class _Run:
    """A run whose newest checkpoint has one file replaced, with digests that fit it or with the old ones."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoint = folder, newest(folder)
        self.files = {path.name: path.read_bytes() for path in self.checkpoint.iterdir()}

    def replace(self, name: str, data: bytes, *, summed: bool) -> None:
        for other, original in self.files.items():
            (self.checkpoint / other).write_bytes(original)
        if summed:
            replace(self.checkpoint, name, data)
        else:
            (self.checkpoint / name).write_bytes(data)


def _checkpoints(folder: Path) -> list[Target]:
    run = _Run(folder)
    data_files = sorted(name for name in run.files if name.endswith(".distcp"))
    everything = sorted(run.files)

    def any_file(draw: Random) -> tuple[str, bytes]:
        name = draw.choice(everything)
        return name, damaged(draw, run.files[name], list(run.files.values()))

    def check(given: Any) -> None:
        name, data = given
        run.replace(name, data, summed=False)
        try:
            check_files(run.checkpoint)
            damaged_by_content = False
        except TrainError:
            damaged_by_content = True
        if damaged_by_content != _differs(name, data, run.files[name]):
            raise WrongError(f"{name}: damage {'is' if damaged_by_content else 'is not'} found")

    def metadata(draw: Random) -> tuple[str, bytes]:
        data = run.files[".metadata"]
        changed = damaged(draw, data, [data]) if draw.random() < 0.6 else _damaged_metadata(draw, data)
        return ".metadata", changed

    def weights(draw: Random) -> tuple[str, bytes]:
        name = draw.choice(data_files)
        return name, damaged(draw, run.files[name], [run.files[name]])

    def read_weights(given: Any) -> None:
        run.replace(*given, summed=True)
        shutil.rmtree(run.folder / "exported", ignore_errors=True)
        convert_checkpoint(run.checkpoint, run.folder / "exported", entry="model")

    return [
        Target("checkpoint, any file", any_file, check, ()),
        Target("checkpoint metadata, with fitting digests", metadata, read_weights, (ValueError, OSError)),
        Target("checkpoint weights, with fitting digests", weights, read_weights, (ValueError, OSError)),
        *_run_files(run),
    ]


def _differs(name: str, data: bytes, before: bytes) -> bool:
    """Whether a file has changed; `run.json`, which has a digest of its content, if its content has."""
    if name != "run.json" or data == before:
        return data != before
    try:
        return bool(json.loads(data) != json.loads(before))
    except (ValueError, RecursionError):
        return True


def _damaged_metadata(draw: Random, data: bytes) -> bytes:
    """A pickle of the same classes with other sizes, offsets, names and files in it."""
    metadata = pickle.loads(data)  # our own
    for _ in range(draw.choice((1, 2, 4))):
        with contextlib.suppress(Exception):  # what was there is not what it was any more
            _change_metadata(draw, metadata)
    return pickle.dumps(metadata)


def _change_metadata(draw: Random, metadata: Any) -> None:
    value = draw.choice(NASTY)
    name, index = draw.choice(list(metadata.state_dict_metadata)), draw.choice(list(metadata.storage_data))
    entry, info = metadata.state_dict_metadata[name], metadata.storage_data[index]
    how = draw.randrange(8)
    if how == 0:
        metadata.state_dict_metadata[name] = value
    elif how == 1:
        entry.size = torch.Size([draw.choice((0, 1, 2**20, 2**40, 2**62)), 7])
    elif how == 2:
        setattr(entry, draw.choice(("size", "chunks", "properties")), value)
    elif how == 3:
        entry.properties.dtype = draw.choice((torch.complex128, torch.bool, value))
    elif how == 4:
        object.__setattr__(info, draw.choice(("relative_path", "offset", "length")), value)
    elif how == 5:
        metadata.storage_data[index] = value
    elif how == 6:
        chunk = draw.choice(entry.chunks)
        setattr(chunk, draw.choice(("sizes", "offsets")), draw.choice((torch.Size([2**40]), value)))
    else:
        fields = ("storage_data", "state_dict_metadata", "planner_data", "storage_meta")
        setattr(metadata, draw.choice(fields), value)


def _run_files(run: _Run) -> list[Target]:
    original, metrics = run.files["run.json"], (run.folder / METRICS).read_bytes()
    about = read_about(run.checkpoint)
    own = RunConfig.from_json(about["config"])
    lines = metrics.splitlines(keepends=True)
    options = train_cli.parser_of("")
    asked = options.parse_args(["--resume", "--steps", "9"])

    def run_json(draw: Random) -> bytes:
        return damaged_text(draw, original, [original])

    def resume(given: Any) -> None:
        run.replace("run.json", given, summed=False)
        config = resumed_config(asked, run.folder, RunConfig.from_json(read_about(run.checkpoint)["config"]))
        config.check(2)
        RunConfig.from_json(json.loads(json.dumps(config.to_json())))
        check_same_run(run.checkpoint, own, about["data"])

    def metrics_file(draw: Random) -> bytes:
        if draw.random() < 0.5:
            return damaged(draw, metrics, [metrics])
        changed = list(lines)
        at = draw.randrange(len(lines))
        changed[at] = json.dumps(damaged_json(draw, json.loads(lines[at]))).encode() + b"\n"
        return b"".join(changed)

    def read_figures(given: Any) -> None:
        path = run.folder / METRICS
        path.write_bytes(given)
        figures = {"step": 3, "loss": 1.0, "tokens_per_s": 1.0, "step_s": 1.0, "memory_mb": 1.0}
        with contextlib.closing(Report(run.folder, 3, 4, quiet=True)) as report:
            report.step(figures)
        entries = read_metrics(path)
        steps, values = losses(entries, "train")
        if len(steps) != len(values) or steps[-1] != 3:
            raise WrongError(f"steps {steps[-3:]}")

    return [
        Target("run.json", run_json, resume, (TrainError,), one_line),
        Target("metrics", metrics_file, read_figures, ()),
    ]


# ---- tokens


def _tokens(folder: Path) -> list[Target]:
    place = folder / "tokens"
    place.mkdir()
    tokens = (np.arange(400) % 251).astype(np.uint16)
    files = {"a.bin": tokens.tobytes(), "a.txt": b"some text, not much of it\n" * 40}
    donors = list(files.values())

    def make(draw: Random) -> tuple[str, bytes, str, int | None]:
        name = draw.choice(list(files))
        data = damaged(draw, files[name], donors) if draw.random() < 0.95 else draw.choice(donors)
        return (
            name, data, draw.choice(("uint16", "uint16", "int64", ">u2", "uint8")), draw.choice((None, 251)),
        )  # fmt: skip

    def read(given: Any) -> None:
        name, data, dtype, vocabulary = given
        path = place / name
        path.write_bytes(data)
        found = read_data([str(path)], dtype=dtype, vocab_size=vocabulary, held_out=(), seq_len=8)
        if found.vocab_size > 1 << 20:
            raise WrongError(f"a vocabulary of {found.vocab_size} from a file of {len(data)} bytes")
        batches = Batches(found.train, 8, 4, 1, 0, 1, 0, found.vocab_size)
        for rows, _ in batches.microbatches(3, torch.device("cpu")):
            if not (rows.shape == (4, 8) and int(rows.min()) >= 0 and int(rows.max()) < found.vocab_size):
                raise WrongError(f"tokens of shape {tuple(rows.shape)} up to {int(rows.max())}")

    return [Target("token files", make, read, (TrainError,), one_line)]


# ---- command lines


class _WouldStart(Exception):
    """A command line got as far as starting ranks."""


@contextlib.contextmanager
def _no_ranks() -> Iterator[None]:
    """Command lines are read, checked and carried out up to the start of ranks."""

    def start(config: RunConfig, ranks: int, **options: Any) -> Any:
        config.check(ranks)
        if RunConfig.from_json(json.loads(json.dumps(config.to_json()))) is None:
            raise AssertionError
        raise _WouldStart

    with contextlib.ExitStack() as inside:
        for module in ("__main__", "compare"):
            inside.enter_context(mock.patch(f"fsdp_runtime.train.{module}.start_ranks", start))
        yield


def command(main: Callable[[list[str]], int], argv: list[str], *, check: bool = False) -> tuple[int, str]:
    """Status and output of a command in this process."""
    with captured() as said:
        try:
            status = main(argv)
        except _WouldStart:
            status = 0
        except SystemExit as error:  # argparse: --help, and layout-planner's errors
            status = int(error.code or 0)
    if check and status not in (0, 1) and problem_of(said.getvalue()):
        raise WrongError(said.getvalue()[-300:])
    return status, said.getvalue()


def problem_of(said: str) -> str | None:
    """What is wrong with what a command that failed printed."""
    if "Traceback" in said:
        return "a traceback"
    return unclear(said)


_TRAIN = [
    "--preset tiny --steps 9 --batch 12 --ranks 2 --device cpu", "--resume --out RUN",
    "--dim 64 --layers 2 --heads 4 --kv-heads 2 --ff-dim 96 --experts 4 --top-k 2 --aux-weight 0.1 --no-tied --ranks 4",
    "--data TEXT --held-out TEXT --dtype uint16 --seq-len 32 --accumulate 2 --lr 0.1 --clip 0 --timeout 9",
    "--ranks 4 --batch 12 --accumulate 3 --optimizer torch-adamw",
    "--hsdp 2 --ranks 4 --quantize fp8 --reduce int8 --block rows:8 --precision bf16",
    "--resume --out RUN --steps 9 --batch 12 --optimizer muon", "compare --vary system=ddp,one --rounds 1 --ranks 2",
    "compare --vary optimizer=adamw,soap --steps 3", "compare --vary gathers=fp32,int8 --ranks 2",
    "plan --preset tiny --ranks 8 --data TEXT", "--help", "plan --help",
    "--system fsdp2 --save-every 0 --profile 1:2",
]  # fmt: skip
_PLAN = [
    "plan --model llama-3-8b --world-size 8", "plan --checkpoint SAFE --world-size 4 --block rows:2 --json",
    "sweep --model llama-3-8b --world-size 8..32 --block rows:1,rows:16", "draw --checkpoint SAFE --world-size 3 -o -",
    "table --model llama-3-8b --world-size 8,24", "plan --model gpt-oss-120b --world-size 16 --align 16",
    "plan --model llama-3-8b --world-size 8 --experts separate --segments 2", "draw --help",
]  # fmt: skip
_WORDS = [
    "", "-", "--", "0", "-1", "1", "3", "999999999999", "1e9", "nan", "inf", "-inf", "0.5", "x", "\n", "a\nb", "é",
    "\udcff", "rows:0", "rows:2", "tile:0x0", "tile:4x4", "whole", "rows:99999999999999999999", "/", ".",
    "..", "**", "[", "i4,i4", "float99", "9" * 5000, "1..", "..", "1..2..3", "8..4:0", ",", "--help", "--r",
    "--no-resume", "%s", "{}", "1,2,,3", "@x", "O", "auto", "none", "adamw", "fsdp2",
]  # fmt: skip


def _commands(folder: Path, run: Path) -> list[Target]:
    known = sorted({word for line in _TRAIN for word in line.split() if word.startswith("--")})
    of_plan = sorted({word for line in _PLAN for word in line.split() if word.startswith("--")})
    values = {"RUN": str(run), "TEXT": str(folder / "text"), "OUT": str(folder / "out.safetensors")}
    values["SAFE"] = str(folder / "safetensors" / "model.safetensors")

    def maker(lines: list[str], flags: list[str]) -> Callable[[Random], list[str]]:
        def make(draw: Random) -> list[str]:
            argv = [values.get(word, word) for word in shlex.split(draw.choice(lines))]
            for _ in range(draw.choice((1, 1, 2, 3))):
                at = draw.randrange(len(argv) + 1)
                how = draw.randrange(5)
                if how == 0:
                    argv[at : at + 1] = []
                elif how == 1:
                    argv[at:at] = [draw.choice(flags), draw.choice(_WORDS)]
                elif how == 2:
                    argv[at:at] = [draw.choice(_WORDS)]
                else:
                    argv[at : at + 1] = [draw.choice(_WORDS)]
            return argv

        return make

    def reader(main: Callable[[list[str]], int], name: str) -> Callable[[object], None]:
        def read(given: Any) -> None:
            status, said = command(main, given)
            if status not in (0, 1, 2) or (status and problem_of(said)):
                raise WrongError(f"status {status}, {problem_of(said)}: {said[-300:]}")
            if status == 2 and f"{name}: " not in said.splitlines()[-1]:
                raise WrongError(f"{len(said.splitlines())} lines: {said[:300]}")

        return read

    return [
        Target("fsdp-train's command line", maker(_TRAIN, known), reader(train_cli.main, "fsdp-train"), ()),
        Target(
            "layout-planner's command line", maker(_PLAN, of_plan), reader(plan_main, "layout-planner"), ()
        ),
    ]

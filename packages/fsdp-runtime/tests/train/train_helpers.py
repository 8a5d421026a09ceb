"""Tiny runs, on ranks that are there already."""

import dataclasses
import hashlib
import json
import shlex
import time
from pathlib import Path

import torch.distributed as dist

from fsdp_runtime.checkpoint import convert_checkpoint
from fsdp_runtime.train import PRESETS, RunConfig, Trainer, TrainError
from fsdp_runtime.train.checkpoint import latest
from fsdp_runtime.train.report import METRICS, read_metrics

TEXT = "".join(f"def f{i}(x):\n    return x + {i * i % 97}\n\n" for i in range(3000))

# Options of a command that takes seconds.
TINY = shlex.split("--preset tiny --seq-len 32 --batch 12 --optimizer torch-adamw --device cpu")


def text_folder(folder):
    """Some files of text, enough for both sides of the split."""
    (folder / "text").mkdir(parents=True)
    for number in range(30):
        (folder / "text" / f"{number}.py").write_text(TEXT[number * 700 : number * 700 + 4000])
    return folder / "text"


def tiny(folder, **changes):
    """A run that takes seconds: its text is in `folder`/text."""
    settings = {
        "model": PRESETS["tiny"], "data": (str(folder / "text"),), "seq_len": 32, "batch": 12, "steps": 8,
        "warmup": 2, "optimizer": "torch-adamw", "eval_every": 0, "save_every": 0, "plot": False, "device": "cpu",
    }  # fmt: skip
    return RunConfig(**{**settings, **changes})


def train(config, out, stop=None):
    """One rank of a run; returns its summary, or the message it ended with."""
    Path(out).mkdir(parents=True, exist_ok=True)
    try:
        return Trainer(config, Path(out), quiet=True, stop=stop or (lambda: False)).run()
    except TrainError as error:
        return str(error)


def train_and_stop(config, out, step, rank):
    """As `train`; one rank is asked to stop during `step`."""
    asked: list = []

    def stop():
        asked.append(None)
        return dist.get_rank() == rank and len(asked) > step

    return train(config, out, stop)


def newest(out):
    """The newest complete checkpoint of a run that has one."""
    found = latest(Path(out))
    assert found is not None
    return found


def write_about(checkpoint, about):
    """Write a checkpoint's run.json, with a digest that fits it."""
    text = json.dumps(about, sort_keys=True).encode()
    (checkpoint / "run.json").write_text(
        json.dumps({"about": about, "digest": hashlib.sha256(text).hexdigest()})
    )


def replace(checkpoint, name, data):
    """Replace a file of a checkpoint, with digests that fit it."""
    (checkpoint / name).write_bytes(data)
    about = json.loads((checkpoint / "run.json").read_text())["about"]
    write_about(checkpoint, {**about, "files": {**about["files"], name: hashlib.sha256(data).hexdigest()}})


def read_model(checkpoint, dtype=None):
    """The whole model of a checkpoint."""
    from safetensors.torch import load_file

    folder = checkpoint.parents[1] / f"{checkpoint.name}-{len(list(checkpoint.parents[1].iterdir()))}"
    convert_checkpoint(checkpoint, folder, entry="model", dtype=dtype)
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def losses(out):
    return {
        entry["step"]: entry["loss"]
        for entry in read_metrics(Path(out) / METRICS)
        if entry["kind"] == "train"
    }


def apart(a, b):
    """The largest relative distance of two curves over the same steps."""
    assert a.keys() == b.keys()
    return max(abs(a[step] - b[step]) / abs(b[step]) for step in b)


def with_changes(config, **changes):
    return dataclasses.replace(config, **changes)


def wait_for(happened, running, seconds=120.0):
    """Until it has happened, while a launch runs."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        assert running.poll() is None, running.communicate()[1]
        time.sleep(0.05)

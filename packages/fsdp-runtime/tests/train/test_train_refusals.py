"""What `fsdp-train` refuses, in one line that names option, file and remedy: options, command lines, damaged files."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from train_helpers import TEXT, tiny

from fsdp_runtime.checkpoint import read_safetensors
from fsdp_runtime.checkpoint.files import Checkpoint
from fsdp_runtime.train import PRESETS, Batches, TrainError, read_data
from fsdp_runtime.train.__main__ import main
from fsdp_runtime.train.plan import make_plan
from layout_planner import Layout

CPU = torch.device("cpu")
ON_FOUR: list[tuple[dict[str, Any], str]] = [
    ({"hsdp": 3}, "--hsdp 3 copies must divide the ranks"),
    ({"hsdp": 0}, "--hsdp 0: expected at least 1"),
    ({"optimizer": "adan"}, "--optimizer 'adan': expected one of torch-adamw"),
    ({"block": "tile:3"}, "--block 'tile:3': "),
    ({"hsdp": 2, "system": "fsdp2"}, "--hsdp 2: only fsdp_runtime has it, not fsdp2"),
    ({"block": "rows:4", "system": "ddp"}, "--block rows:4: only fsdp_runtime has it, not ddp"),
    ({"dtype": "float99"}, "--dtype 'float99': expected one of uint8, uint16"),
    ({"quantize": "fp4"}, "expected one of none, fp8, int8"),
    ({"reduce": "fp8"}, "expected one of none, bf16, int8"),
    ({"quantize": "fp8", "system": "fsdp2"}, "only fsdp_runtime has it, not fsdp2"),
    ({"accumulate": 5}, "4 ranks x 5 microbatches a global batch of 12 sequences"),
    *(({"profile": p}, f"--profile {p}: expected START:STOP") for p in ("3", "3:", "3:3", "4:3", "-1:3", "a:b")),
    ({"profile": "7:9", "steps": 8}, "--profile 7:9: --steps 8 has no step 8"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), ON_FOUR)
def test_options_are_refused_before_any_process_starts(tmp_path, changes, message):
    with pytest.raises(TrainError) as error:
        tiny(tmp_path, **changes).check(4)
    assert message in str(error.value)


# Command lines, and parts of their messages.
ARGV = [
    (["--ranks", "0"], "--ranks 0"),
    (["plan", "--ranks", "-1"], "--ranks -1: expected at least 1"),
    (["--ranks", "5", "--batch", "12"], "5 ranks x 1 microbatches a global batch of 12"),
    (["--layers", "0"], "num_layers is 0"),
    (["--resume", "runs/001"], "unrecognized arguments: runs/001 (see "),
    (["--lr", "nan"], "--lr nan"),
    (["--system", "deepspeed"], "--save-every 0"),
    (["--resume", "--out", "nowhere"], "nowhere has no complete checkpoint"),
    (["comapre"], "'comapre' is not a subcommand: there are compare, "),
    (["--stepz", "3"], "unrecognized arguments: --stepz 3 (see fsdp-train --help)"),
    (["--dim", "wide"], "argument --dim: invalid int value: 'wide'"),
    (["compare", "--rounds", "0"], "--rounds 0: expected at least 1"),
    (["compare", "--vary", "dim=1,2"], "--vary dim=1,2: expected system=A,B,..."),
    (["compare", "--vary", "system=fsdp3"], "--vary system: 'fsdp3' is not one of"),
    (["compare", "--vary", "optimizer=adamm"], "--vary optimizer: 'adamm' is not one of"),
    (["compare", "--vary", "gathers=fp4"], "--vary gathers: 'fp4' is not one of fp32"),
    (["--out", "x" * 5000, "--resume"], "xxx"),
    (["9" * 5000], "999"),
    (["--steps", "1\n2"], "--steps"),
]


@pytest.mark.parametrize(("argv", "message"), ARGV)
def test_a_command_line_is_refused_in_one_line_before_any_rank_starts(argv, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(argv) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("fsdp-train: ")
    assert message in said
    assert "\n" not in said
    assert len(said) < 2000


# -- files -------------------------------------------------------------------------------------------------------------


def read(name, dtype="uint16", **options):
    settings = {"vocab_size": None, "held_out": (), "seq_len": 32, **options}
    return lambda folder: read_data([str(folder / name)], dtype=dtype, **settings)


def first_batches(folder):
    data = read("a.bin", vocab_size=100)(folder).train
    found = Batches(data, 32, 12, 1, 0, 1, 3, 100)
    return [found.microbatches(step, CPU) for step in range(20)]


def codes():
    from safetensors.torch import save

    return save({"w": torch.zeros(8, 16, dtype=torch.float8_e4m3fn), "w_scale_inv": torch.ones(2, 2)})


def with_header(text):
    return len(text).to_bytes(8, "little") + text.encode() + bytes(64)


INDEX, CONFIG, MODEL = "m.safetensors.index.json", "config.json", "m.safetensors"
ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}
FILES: list[tuple[dict[str, Any], Any, str]] = [
    ({}, read("nothing"), "no data: .* matches no file"),
    ({"short.txt": b"abc"}, read("short.txt"), "a sequence of 32 tokens is longer than the training data"),
    ({"empty.txt": b""}, read("empty.txt"), "longer than the training data"),
    ({"data.txt": b"a\0b" * 99}, read("data.txt"), "is not text"),
    ({"data.bin": b"123"}, read("data.bin"), "is not an array of uint16"),
    ({"loop.py": "loop.py"}, read("loop.py"), r"loop\.py"),  # a link to itself
    ({}, read(""), "no data: .* matches no file"),
    ({"a.bin": b"tokens", "b.txt": TEXT.encode()}, read(""), "mixes text with token arrays"),
    ({"a.bin": (np.arange(9000, dtype=np.uint16) % 500).tobytes()}, first_batches,
     r"a.bin has tokens from \d+ to \d+, the vocabulary has 100"),
    ({"tokens.bin": np.arange(500, dtype=np.uint32).tobytes()}, read("", "uint32", seq_len=8), "need --vocab-size"),
    *(({INDEX: json.dumps({"weight_map": {"t": name}}).encode()}, Checkpoint, "which is not a file name")
      for name in ("x" * 5000, "a\nb", "\ud800", "../m.safetensors")),
    *(({INDEX: index, MODEL: codes}, Checkpoint, message)
      for index, message in ((b"{", "not JSON"), (b'{"weight_map": [1]}', "no weight_map"),
                             (b'{"weight_map": {"b": "m.safetensors"}}', "b is not in it, but the index lists it"),
                             (b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"))),
    *(({MODEL: with_header(header)}, Checkpoint, "m.safetensors: not a safetensors file, or damaged: .")
      for header in (json.dumps({"a": ENTRY}), json.dumps({"a": {**ENTRY, "dtype": "F" * 4000}}), "{" * 100_000)),
    ({MODEL: codes}, read_safetensors, "weight_block_size is None"),
    ({CONFIG: b'{"quantization_config": {"weight_block_size": [2, 2]}}', MODEL: codes}, read_safetensors,
     r"shape \(2, 2\); expected \(4, 8\) for tiles of \[2, 2\]"),
    *(({CONFIG: config.encode(), MODEL: codes}, read_safetensors, "not JSON|weight_block_size is")
      for config in ("[]", "7", '{"quantization_config": 3}', "[" * 100_000, "{",
                     *(f'{{"quantization_config": {{"weight_block_size": {size}}}}}'
                       for size in ("[1]", "[[1], 2]", "[0, 8]", '["4", 8]', "[1.5, 8]")))),
    ({}, lambda folder: make_plan(tiny(folder, system="fsdp2"), 256, 2), "not fsdp2"),
    ({}, lambda folder: Layout.from_json(json.dumps({"format": "9" * 100_000})), "this is not a layout"),
    ({}, lambda folder: replace(PRESETS["tiny"], dim=30), "channels a head"),
    ({}, lambda folder: replace(PRESETS["tiny"], num_kv_heads=3), "do not divide by 3"),
    ({}, lambda folder: replace(PRESETS["tiny"], num_experts=1), "1 experts"),
    ({}, lambda folder: replace(PRESETS["tiny"], num_layers=0), "num_layers is 0"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "call", "message"), FILES, ids=range(len(FILES)))
def test_a_file_is_refused_in_a_short_message_that_names_it(files, call, message, tmp_path):
    for name, content in files.items():
        if isinstance(content, str):
            (tmp_path / name).symlink_to(tmp_path / content)
        else:
            (tmp_path / name).write_bytes(content() if callable(content) else content)
    with pytest.raises((TrainError, ValueError, OSError), match=message) as caught:
        call(tmp_path)
    assert len(str(caught.value)) < 1000
    del caught  # a cycle with this frame, in which numpy leaves its file open

"""Traces and memory snapshots of steps."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from train_helpers import tiny, train

from fsdp_runtime.train import Trainer, TrainError
from fsdp_runtime.train.tracing import recording
from ragged_shard.testing import run_ranks


def names(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_a_profile_has_its_steps_and_the_units_labels_on_each_rank(folder, tmp_path):
    run_ranks(2, train, tiny(folder, steps=3, profile="1:2"), tmp_path)
    assert len(list(tmp_path.glob("trace-*"))) == 2
    for rank in range(2):
        found = names(tmp_path / f"trace-rank-{rank}.json")
        assert {name for name in found if "ProfilerStep" in name} == {"ProfilerStep#1"}
        assert {"FSDP::all_gather (blocks.0)", "FSDP::post_backward_reduce (blocks.0)"} <= found


@pytest.mark.parametrize("begins", [0, 1])
def test_a_profile_may_begin_with_the_first_step_and_be_cut_off_by_the_end(folder, tmp_path, begins):
    profile, asked = ("0:2", "1:9")[begins], iter([0, 0, *[1] * 9])
    config = tiny(folder, system="one", steps=9, profile=profile)
    assert Trainer(config, tmp_path, quiet=True, stop=lambda: next(asked)).run()["stopped"]
    steps = {name for name in names(tmp_path / "trace-rank-0.json") if "ProfilerStep" in name}
    assert "ProfilerStep#1" in steps
    assert ("ProfilerStep#0" in steps, "ProfilerStep#2" in steps) == (begins == 0, begins == 1)


@pytest.fixture
def allocator(monkeypatch):
    """An allocator in place of CUDA's; returns the list of what it was asked for."""
    calls: list = []

    class Memory:
        _record_memory_history = staticmethod(lambda *args, **options: calls.append((*args, options)))

        @staticmethod
        def _dump_snapshot(path):
            calls.append(Path(path).name)
            Path(path).write_bytes(b"snapshot")

    module = SimpleNamespace(memory=Memory, is_available=lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return calls


GPU = torch.device("cuda", 0)
STARTS = ({"max_entries": 100_000, "stacks": "python"},)
ENDS: tuple = (None, {})


def test_a_memory_snapshot_is_written_after_its_step_with_all_history(allocator, tmp_path):
    with recording(None, 1, 0, tmp_path, 3, GPU) as after:
        for step in range(3):
            allocator.append(step)
            after(step)
    assert allocator == [STARTS, 0, 1, "memory-rank-3.pickle", 2, ENDS]


@pytest.mark.parametrize("asked", [None, 7])
def test_an_out_of_memory_error_writes_a_snapshot_before_the_history_ends(allocator, tmp_path, asked):
    with pytest.raises(torch.OutOfMemoryError) as error, recording(None, asked, 0, tmp_path, 0, GPU):
        raise torch.OutOfMemoryError("20 GiB")
    written = ["out-of-memory-rank-0.pickle"]
    assert allocator == (written if asked is None else [STARTS, *written, ENDS])
    assert error.value.__notes__ == [f"Memory snapshot: {tmp_path / written[0]}"]


def test_other_errors_write_no_snapshot_and_a_failed_one_hides_no_error(allocator, tmp_path):
    with pytest.raises(RuntimeError), recording(None, None, 0, tmp_path, 0, GPU):
        raise RuntimeError("NCCL")
    assert not allocator
    with pytest.raises(torch.OutOfMemoryError) as error, recording(None, None, 0, tmp_path / "gone", 0, GPU):
        raise torch.OutOfMemoryError("20 GiB")
    assert error.value.__notes__[0].startswith("No memory snapshot: FileNotFoundError: ")


def test_a_memory_snapshot_beyond_the_last_step_is_refused(folder, allocator):
    tiny(folder, steps=8, memory_snapshot=7).check(1)
    with pytest.raises(TrainError, match="--memory-snapshot 8: the last step of --steps 8 is 7"):
        tiny(folder, steps=8, memory_snapshot=8).check(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_a_gpu_has_who_allocated(tmp_path):
    with recording(None, 0, 0, tmp_path, 0, GPU) as after:
        kept = torch.zeros(1 << 20, device=GPU)
        after(0)
    snapshot = pickle.loads((tmp_path / "memory-rank-0.pickle").read_bytes())
    frames = [frame["name"] for event in snapshot["device_traces"][0] for frame in event["frames"]]
    assert "test_a_snapshot_of_a_gpu_has_who_allocated" in frames
    assert kept.is_cuda

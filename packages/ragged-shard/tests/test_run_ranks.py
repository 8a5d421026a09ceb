"""The harness that starts ranks."""

import ctypes
import dataclasses
import functools
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ragged_shard.testing import (
    RankError,
    on_ranks,
    preload,
    rank_mesh,
    record_collectives,
    run_ranks,
    shut_down,
)


@dataclasses.dataclass
class Case:
    factor: int


def summed(case, offset=0):
    x = torch.full((1,), float(dist.get_rank() * case.factor + offset))
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_come_back_as_a_list_by_rank(ranks):
    assert run_ranks(ranks, dist.get_rank) == list(range(ranks))
    assert run_ranks(ranks, summed, Case(2), offset=1) == [float(ranks * (ranks - 1) + ranks)] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_a_decorated_test_runs_on_every_rank_with_its_arguments(ranks, tmp_path):
    assert summed(Case(2)) == ranks * (ranks - 1)
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == ranks


def test_a_decorated_test_that_fails_on_a_rank_is_named():
    with pytest.raises(RankError, match=r"fails_on_one \(test_run_ranks.py\): rank 1 of 2 failed"):
        fails_on_one(reason="none")


@on_ranks(2, timeout=30)
def fails_on_one(reason):
    assert dist.get_rank() == 0, reason


def test_partials_classes_of_the_test_module_and_tensors_travel_both_ways():
    (result,) = set(run_ranks(2, functools.partial(summed, Case(3))))
    assert result == 3.0
    (case, tensor), _ = run_ranks(2, echo, (Case(5), torch.arange(3)))
    assert case == Case(5)
    assert torch.equal(tensor, torch.arange(3))


def echo(value):
    return value


def process():
    return os.getpid()


def test_ranks_stay_warm_from_call_to_call():
    assert run_ranks(2, process) == run_ranks(2, process)


def raise_on_one():
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def test_an_exception_comes_back_with_its_rank_and_traceback_and_new_ranks_take_over():
    before = run_ranks(3, process)
    with pytest.raises(RankError, match=r"rank 1 of 3 failed[\s\S]*raise_on_one[\s\S]*the reason") as caught:
        run_ranks(3, raise_on_one)
    assert isinstance(caught.value.causes[1], ValueError)
    assert "rank 0 was still running" in str(caught.value)
    assert not set(before) & set(run_ranks(3, process))


def hang_on_one():
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def test_a_hang_is_a_failure_with_every_ranks_stack_within_the_timeout():
    run_ranks(2, process)
    with pytest.raises(RankError, match=r"rank 0, 1 of 2 did not answer in 1 s") as caught:
        run_ranks(2, hang_on_one, timeout=1)
    assert str(caught.value).count("in hang_on_one") == 2
    assert run_ranks(2, dist.get_rank) == [0, 1]


def die():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_named_with_its_signal():
    with pytest.raises(RankError, match=r"rank 0 of 2 failed[\s\S]*signal 9"):
        run_ranks(2, die)


def crash_in_a_native_thread():
    """Of gloo's, which Python does not know: it has no Python stack."""
    print("a warning", file=sys.stderr)
    (victim, *_) = [
        int(task.name) for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()
    ]
    if dist.get_rank() == 0:
        ctypes.CDLL(None).syscall(234, os.getpid(), victim, signal.SIGSEGV)  # tgkill
        time.sleep(10)


def warn():
    print("another warning", file=sys.stderr)


CRASHES = """
from pathlib import Path
from ragged_shard.testing import RankError, run_ranks
from test_run_ranks import crash_in_a_native_thread, warn
if __name__ == "__main__":
    run_ranks(2, warn)
    try:
        run_ranks(2, crash_in_a_native_thread)
    except RankError as error:
        print(error)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="a system call by its number"
)
@pytest.mark.long
def test_with_native_stacks_a_crash_shows_what_each_native_thread_did(tmp_path):
    (tmp_path / "crashes.py").write_text(CRASHES)
    env = {**os.environ, "RAGGED_SHARD_NATIVE_STACKS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "crashes.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert "rank 0 of 2 failed" in ended.stdout
    assert "the process died (signal 11)" in ended.stdout
    assert "gloo::transport::tcp::Loop::run" in ended.stdout
    assert ended.stdout.count("a warning") == 1
    assert "another" not in ended.stdout
    assert ended.stderr.count("another warning") == 2


def leave_a_thread():
    threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()
    return os.getpid()


def destroy():
    dist.destroy_process_group()
    return os.getpid()


def make_groups():
    dist.new_group([0, 1])
    return os.getpid()


@pytest.mark.parametrize("spoil", [leave_a_thread, destroy, make_groups])
def test_ranks_that_a_job_has_spoilt_are_replaced(spoil):
    assert not set(run_ranks(2, spoil)) & set(run_ranks(2, process))


def take_a_mesh():
    mesh = rank_mesh(2, 1, names=("a", "b"))
    assert rank_mesh(2, 1, names=("a", "b")) is mesh is not rank_mesh(1, 2)
    return os.getpid()


def start_again(folder):
    """A mesh before and after torch.distributed was initialized again; the group of each rank alone in the second."""
    rank = dist.get_rank()
    rank_mesh(2, 1, names=("a", "b"))
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return dist.get_process_group_ranks(rank_mesh(2, 1, names=("a", "b")).get_group("b"))


def test_a_shared_mesh_is_another_one_after_torch_distributed_was_initialized_again(tmp_path):
    assert run_ranks(2, start_again, str(tmp_path)) == [[0], [1]]


def test_ranks_whose_groups_are_those_of_shared_meshes_stay_and_so_do_the_meshes():
    assert run_ranks(2, take_a_mesh) == run_ranks(2, take_a_mesh) == run_ranks(2, process)


def draw():
    return torch.rand(1).item(), random.random()


def test_every_rank_and_every_call_starts_from_the_same_seed():
    first = run_ranks(3, draw)
    assert len(set(first)) == 1
    assert run_ranks(3, draw) == first
    torch.manual_seed(7)
    assert {value for value, _ in run_ranks(3, draw, seed=7)} == {torch.rand(1).item()}


def unpicklable():
    return threading.Lock()


def test_bad_arguments_and_what_cannot_be_sent_or_pickled_raise():
    with pytest.raises(TypeError, match="top-level function"):
        run_ranks(2, lambda: None)
    with pytest.raises(RankError, match="cannot pickle"):
        run_ranks(2, unpicklable)
    with pytest.raises(ValueError, match="at least 1 rank"):
        run_ranks(0, process)
    with pytest.raises(ValueError, match="'cpu' or an accelerator"):
        run_ranks(1, process, device="tpu")
    with pytest.raises(RuntimeError, match="need as many devices"):
        run_ranks(1000, process, device="cuda")


@on_ranks(3)
def test_collectives_and_their_bytes_are_counted_inside_the_block_only():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(6)
    with record_collectives() as record:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        splits = [1 + peer for peer in range(ranks)]
        dist.all_to_all_single(
            torch.zeros((rank + 1) * ranks), torch.ones(sum(splits)), [rank + 1] * ranks, splits
        )
    after = x.clone()
    dist.all_reduce(after)
    assert record.kinds == ["all_reduce", "broadcast", "all_to_all"]
    assert [event.ranks for event in record.events] == [ranks] * 3
    assert record.events[0].bytes_sent == pytest.approx(2 * 24 * (ranks - 1) / ranks)
    assert record.events[1].bytes_sent == (24 * (ranks - 1) if rank == 0 else 0)
    assert record.events[2].bytes_sent == (sum(splits) - splits[rank]) * 4
    return record.bytes_sent


def on_gpu():
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    return x.tolist(), torch.cuda.current_device()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_run_on_gpus_with_nccl():
    assert run_ranks(1, on_gpu, device="cuda") == [([1.0, 1.0], 0)]


def imported(module):
    return module in sys.modules


@pytest.mark.long
def test_ranks_share_what_was_preloaded_before_the_first_of_them():
    module = "tabnanny"  # nothing else imports it
    assert run_ranks(2, imported, module) == [False, False]
    preload(module)
    assert run_ranks(2, imported, module) == [False, False]
    shut_down()
    assert run_ranks(2, imported, module) == [True, True]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nowhere_to_be_found", "cannot import preloaded: No module named 'nowhere_to_be_found'"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "importing preloaded started a thread",
        ),
    ],
)
@pytest.mark.long
def test_a_module_that_cannot_be_preloaded_is_named(tmp_path, source, message):
    (tmp_path / "preloaded.py").write_text(source)
    program = """
import torch.distributed as dist
from ragged_shard.testing import preload, run_ranks
preload("preloaded")
run_ranks(1, dist.get_rank)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"the process that forks ranks did not start ({message}" in done.stderr

"""Forked children, dropped buffers, destroyed groups and interpreters that exit while an exchange is under way."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import SIZE, build_large, error_of, load, peers_of, swap, zero

from dbuffer import Gather
from dbuffer.transport import transport_of
from ragged_shard.testing import on_ranks


@on_ranks(2)
def test_a_peer_that_ends_fails_what_is_under_way_and_what_follows_at_once():
    """Rank 1 drops its connections, which is what dying does to them; a child that it forked lives on."""
    peers = peers_of()
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        del peers
        gc.collect()
        dist.barrier()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return
    first, second = (error_of(swap(peers, torch.zeros(4), [torch.zeros(4)]).wait) for _ in range(2))
    assert first == "rank 1 of the group has ended or given up, during x"
    assert second == "the connections of this rank to the others of the group are closed; x needs them"
    dist.barrier()


@on_ranks(2)
def test_a_forked_child_fails_at_once_and_leaves_its_parents_connections_alone():
    """A forked child uses what it inherited, then runs its finalizers, in the middle of an exchange of its parent."""
    peers = peers_of()
    mine, theirs = torch.full((SIZE,), float(dist.get_rank())), torch.zeros(SIZE)
    if dist.get_rank() == 0:
        work = swap(peers, mine, [theirs])
        ours, childs = os.pipe()
        child = os.fork()
        if not child:
            both = [error_of(work.wait), error_of(lambda: swap(peers, mine, [theirs]).wait())]
            os.write(childs, "\n".join(both).encode())
            del work, peers
            gc.collect()
            os._exit(0)
        os.close(childs)
        with os.fdopen(ours) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        assert said.splitlines() == [
            "its connections belong to the process that forked this one",
            "the connections of this rank to the others of the group are closed; x needs them",
        ]
        dist.barrier()
    else:
        dist.barrier()
        work = swap(peers, mine, [theirs])
    work.wait()
    dist.barrier()
    assert (theirs == 1 - dist.get_rank()).all()


@on_ranks(2)
def test_a_buffer_dropped_under_way_neither_gives_nor_takes_wrong_bytes():
    """Rank 0 drops buffer and handle under way, and its memory goes to whoever asks."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    buffer = build_large(group=group)
    load(buffer, {"w": torch.full((1024, 1024), 3.0)})
    Gather([buffer]).start().wait()
    zero(buffer.full)
    dist.barrier()
    if dist.get_rank() == 0:
        Gather([buffer]).start()
        del buffer
        gc.collect()
        others = [torch.full((n, 1024), -1.0) for n in (512, 512, 1024, 1024)]
        dist.barrier()
        dist.barrier()
        assert all((other == -1).all() for other in others)
        return
    dist.barrier()
    with contextlib.suppress(RuntimeError):
        Gather([buffer]).start().wait()
        assert (buffer.views["w"] == 3).all()
    dist.barrier()


@on_ranks(2)
def test_where_a_group_is_destroyed_under_way_both_sides_raise():
    group = dist.new_group(timeout=timedelta(seconds=2))
    full, mine = torch.zeros(2 << 18), torch.full((1 << 18,), float(dist.get_rank()))
    moving = transport_of(group, "peer_memory")
    moving.all_gather([(full, mine)], "x").wait()
    full.fill_(7.0)
    dist.barrier()
    said = ""
    if dist.get_rank() == 0:
        work = moving.all_gather([(full, mine)], "x")
        dist.destroy_process_group(group)
        del moving, group
        gc.collect()
        said = error_of(work.wait)
        mine.fill_(-1.0)
        dist.barrier()
    else:
        dist.barrier()
        said = error_of(lambda: moving.all_gather([(full, mine)], "x").wait())
    dist.barrier()
    assert said


@on_ranks(2)
def test_a_transport_whose_group_is_gone_does_not_use_another():
    """Torch takes None for the group of all ranks."""
    group = dist.new_group()
    dist.barrier(group=group)  # both ranks are connected
    moving: Any = transport_of(group, "collectives")
    del group
    dist.destroy_process_group(moving._group())
    gc.collect()
    full, mine = torch.zeros(4), torch.zeros(2)
    assert (
        error_of(lambda: moving.all_gather([(full, mine)], "x"))
        == "the process group of this transport is gone"
    )


ENDING = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from dbuffer.transport import transport_of
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=20))
full, mine = torch.zeros(2 << 18), torch.full((1 << 18,), float(rank + 1))
moving = transport_of(dist.group.WORLD, "peer_memory")
moving.all_gather([(full, mine)], "x").wait()
full.zero_()
def many():  # which take the thread long to drop
    return moving.all_gather(list(zip(full.split(4), mine.split(2), strict=True)), "x")
if rank == 0:
    work = many()
    sys.exit()
time.sleep(1.0)
try:
    many().wait()
    print(full.unique().tolist())
except RuntimeError as error:
    print(error)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.long
def test_an_interpreter_that_exits_under_way_ends_and_its_peer_raises(tmp_path):
    ours = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    options: Any = {
        "env": os.environ | ours,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    command = [sys.executable, "-c", ENDING]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **options) for rank in range(2)]
    said = [rank.communicate(timeout=180)[0].strip() for rank in ranks]
    assert ranks[0].returncode == 0, said
    assert said[1].startswith(
        (
            "rank 0 of the group has ended or given up, during all_gather of x",
            "the connections of this rank to the others of the group are closed; all_gather of x needs them",
        )
    )

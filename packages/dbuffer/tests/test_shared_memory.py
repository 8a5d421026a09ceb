"""Memory that other processes map: ranges, pages and forked children."""

import ctypes
import errno
import gc
import os
import random
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import build_large, load

from dbuffer import Gather, Recycler
from dbuffer._torch_compat import CAN_SWAP
from dbuffer.transport.peer import arena as shared_memory
from dbuffer.transport.peer.arena import Arena
from ragged_shard.testing import on_ranks, run_ranks

MIB = 1 << 20
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not CAN_SWAP, reason="this platform shares no memory"
)


def offset_of(tensor):
    return shared_memory.offset_of(tensor.data_ptr(), tensor.nbytes)


def pages_of(arena):
    """Bytes of pages that a file holds."""
    return os.fstat(arena.fd).st_blocks * 512


def test_ranges_in_use_never_overlap_and_keep_few_pages_more_than_were_in_use():
    arena, dice = Arena(), random.Random(1)
    held: list[tuple[torch.Tensor, int]] = []
    recent: list[int] = []
    for step in range(1000):
        if held and (len(held) > 12 or dice.random() < 0.5):
            tensor, value = held.pop(dice.randrange(len(held)))
            assert bool((tensor == value).all())
            del tensor
        else:
            tensor = arena.allocate(dice.randrange(1, 40) * 10_000)
            tensor.fill_(step % 251)
            held.append((tensor.view(-1, 10), step % 251))  # memory lives as long as a view of it
            del tensor
        in_use = sum(-(-t.nbytes // 4096) * 4096 for t, _ in held)
        recent.append(in_use)
        assert in_use <= pages_of(arena) <= 1.25 * max(recent[-6 * shared_memory._LATELY :])
    held.clear()
    arena.trim()
    assert pages_of(arena) == 0


def test_threads_may_drop_memory_at_any_time():
    arena, stop = Arena(), threading.Event()
    shared: list[torch.Tensor] = []

    def drops():
        while not stop.is_set():
            if shared:
                shared.pop()

    thread = threading.Thread(target=drops)
    thread.start()
    for number in range(500):
        tensor = arena.allocate(Arena.smallest * (1 + number % 5))
        tensor.fill_(number % 200)
        assert bool((tensor == number % 200).all())
        shared.append(tensor)
    stop.set()
    thread.join()
    shared.clear()
    del tensor
    arena.allocate(1)
    arena.trim()
    assert pages_of(arena) == 0


def replace_populating(monkeypatch, populate):
    """Let `populate(address, size, advice)` stand for the calls that allocate pages."""
    usual = shared_memory._libc()

    class Libc:
        def __getattr__(self, name):
            return getattr(usual, name)

        def madvise(self, *call):
            return (populate if call[2] == shared_memory._POPULATE_WRITE else usual.madvise)(*call)

    monkeypatch.setattr(shared_memory, "_libc", Libc)


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EFAULT])
def test_without_memory_it_raises_and_the_range_is_free_again(monkeypatch, error):
    arena = Arena()

    def refuse(address, size, advice):
        ctypes.set_errno(error)
        return -1

    replace_populating(monkeypatch, refuse)
    with pytest.raises(RuntimeError, match=r"no memory for 1048576 bytes for ranks to share: \[Errno"):
        arena.allocate(MIB)
    monkeypatch.undo()
    gc.collect()
    again = arena.allocate(MIB)
    assert again.data_ptr() == arena.address
    assert pages_of(arena) == again.nbytes


def test_nobody_can_make_the_file_shorter():
    arena = Arena()
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)


def test_pages_are_kept_while_a_recycler_lives_and_then_given_back():
    gc.collect()
    recycler, storage = Recycler("cpu"), torch.UntypedStorage(0)
    recycler.take_from(shared_memory.arena())
    shared_memory.arena().trim()
    before = pages_of(shared_memory.arena())
    for _ in range(3):
        recycler.allocate(storage, 4 * MIB)
        recycler.recycle(storage)
        recycler.trim()
        assert pages_of(shared_memory.arena()) == before + 4 * MIB
    recycler.allocate(storage, 2 * MIB)
    recycler.recycle(storage)
    del recycler
    assert pages_of(shared_memory.arena()) == before


def in_child(call):
    """What `call` returns in a forked child, as text, and the child's exit status."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        try:
            os.write(theirs, str(call()).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        text = pipe.read()
    return text, os.waitpid(child, 0)[1]


def has_memory_of_ranks():
    """Whether this process maps or holds memory that ranks share, which lives as long as the process."""
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return "memfd:dbuffer" in Path("/proc/self/maps").read_text() + " ".join(files)


def a_rank_forks(seen):
    """Let `seen` look in a child of rank 0; the parent's memory and its pages stay."""
    buffer = build_large()
    load(buffer, {"w": torch.full((1024, 1024), 3.0)})
    Gather([buffer]).start().wait()
    result = None
    if dist.get_rank() == 0:
        buffer.recycler.recycle(parked := parked_block(buffer.recycler))
        assert has_memory_of_ranks()
        shared_memory.arena().trim()  # from now on pages of free ranges are given back
        pages = pages_of(shared_memory.arena())
        result = in_child(lambda: seen(buffer, parked))
        assert pages_of(shared_memory.arena()) == pages
    dist.barrier()
    assert buffer.full[0].unique().tolist() == [3.0]
    buffer.release()
    Gather([buffer]).start().wait()
    assert buffer.full[0].unique().tolist() == [3.0]
    return result


def parked_block(recycler):
    storage = torch.UntypedStorage(0)
    recycler.allocate(storage, MIB)
    return storage


def memory_of_its_own(buffer, parked):
    inherited = has_memory_of_ranks()
    buffer.recycler.allocate(parked, MIB)
    torch.empty(0, dtype=torch.uint8).set_(parked, 0, (MIB,), (1,)).fill_(1)
    other = shared_memory.arena().allocate(MIB).fill_(5)
    return [inherited, parked[MIB - 1], other.unique().tolist()]


def gathered_values(buffer, parked):
    shared_memory.arena().allocate(MIB).fill_(5)
    return buffer.full[0].unique()


def test_a_forked_child_has_memory_of_its_own():
    assert run_ranks(2, a_rank_forks, memory_of_its_own)[0] == ("[False, 1, [5]]", 0)


def test_a_forked_child_that_reads_gathered_memory_ends_and_reads_no_other_value():
    text, status = run_ranks(2, a_rank_forks, gathered_values)[0]
    assert text == ""
    assert os.WTERMSIG(status) == signal.SIGSEGV


@on_ranks(2)
def test_gathered_tensors_can_be_saved_and_shared(tmp_path):
    buffer = build_large(name="unit")
    load(buffer, {"w": torch.arange(1024.0 * 1024).view(1024, 1024)})
    Gather([buffer]).start().wait()
    view = buffer.views["w"]
    assert offset_of(view) is not None
    torch.save(view, f"{tmp_path}/{dist.get_rank()}")
    assert torch.equal(torch.load(f"{tmp_path}/{dist.get_rank()}"), view)
    expected = view.clone()
    view.share_memory_()
    assert torch.equal(view, expected)
    Gather([buffer]).start().wait()  # from memory of torch's own
    assert torch.equal(view, expected)
    buffer.release()
    Gather([buffer]).start().wait()
    assert torch.equal(view, expected)
    assert offset_of(view) is not None


@on_ranks(2)
def test_where_memory_cannot_be_shared_buffers_have_their_own():
    refused = mock.Mock(side_effect=OSError("not here"))
    with mock.patch.multiple(shared_memory, arena=refused, _arena=None):
        buffer = build_large(transport="auto", recycler=Recycler("cpu"), group=dist.new_group())
        load(buffer, {"w": torch.full((1024, 1024), 2.0)})
        Gather([buffer]).start().wait()
        assert (buffer.full[0] == 2).all()

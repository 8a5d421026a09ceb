"""Large memory on the host asks for huge pages, and nothing but it."""

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from dbuffer_helpers import can_swap

from dbuffer import Recycler
from dbuffer.memory import huge_pages
from dbuffer.memory.geometry import geometry_of
from dbuffer.memory.recycler import ShardMemory
from layout_planner import TensorSpec, plan

LARGE = huge_pages.SMALLEST
needs_linux = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no transparent huge pages",
)


@pytest.fixture
def asked(monkeypatch):
    """What the kernel is asked for: pairs of first address and bytes."""
    calls = []

    def advise(begin, nbytes, advice):
        calls.append((begin, nbytes))
        return 0

    monkeypatch.setattr(huge_pages, "_advise", lambda: advise)
    return calls


class Memory:
    """Stands for host memory at any address."""

    device = torch.device("cpu")

    def __init__(self, address, nbytes):
        self.address, self.nbytes = address, nbytes

    def data_ptr(self):
        return self.address


def test_only_whole_pages_inside_the_memory_are_asked_for(asked):
    dice, page = random.Random(0), huge_pages.PAGE
    places = [(dice.randrange(1, 1 << 40), dice.randrange(LARGE, 1 << 30)) for _ in range(500)]
    places += [
        (begin, size) for begin in (page, page + 1, 2 * page - 1) for size in (LARGE, LARGE + 1, 3 * page - 1)
    ]
    for address, nbytes in places:
        memory: Any = Memory(address, nbytes)
        huge_pages.prefer_huge_pages(memory)
        begin, size = asked.pop()
        assert begin % page == size % page == 0
        assert size > 0
        assert address <= begin < address + page
        assert address + nbytes - page < begin + size <= address + nbytes


@can_swap  # else none is parked
def test_a_recycler_asks_for_new_blocks_and_not_for_parked_ones(asked):
    recycler = Recycler("cpu")
    storage = torch.UntypedStorage(0)
    for _ in range(3):
        recycler.allocate(storage, LARGE)
        recycler.recycle(storage)
    assert len(asked) == 1


def new_shard(elements=LARGE // 4):
    layout = plan([TensorSpec("weight", (elements,))], 1, align=1)
    return ShardMemory(geometry_of(layout, 0), torch.float32, torch.device("cpu"), None)


def test_a_shard_asks_each_time_that_it_is_allocated_unless_it_is_small(asked):
    assert not new_shard(LARGE // 4 - 1).flats[0].any()
    Recycler("cpu").allocate(torch.UntypedStorage(0), LARGE - 1)
    assert asked == []
    shard = new_shard()
    assert not shard.flats[0].any()
    shard.give()
    shard.allocate()
    assert len(asked) == 2


@needs_linux
def test_the_kernel_has_noted_the_wish():
    memory = torch.empty(4 * LARGE, dtype=torch.uint8)
    huge_pages.prefer_huge_pages(memory)
    assert "hg" in _flags_of(memory.data_ptr() + LARGE)


def test_a_kernel_that_refuses_changes_nothing(monkeypatch):
    monkeypatch.setattr(huge_pages, "_advise", lambda: lambda *call: -1)
    recycler, storage = Recycler("cpu"), torch.UntypedStorage(0)
    recycler.allocate(storage, LARGE)
    assert storage.nbytes() == LARGE


@pytest.mark.parametrize("value", ["0", "", None])
def test_the_variable_or_a_c_library_without_the_call_turns_it_off(monkeypatch, value):
    if value is None:
        monkeypatch.setattr(ctypes, "CDLL", lambda *given: object())
    else:
        monkeypatch.setenv(huge_pages.VARIABLE, value)
    assert huge_pages._advise.__wrapped__() is None


def _flags_of(address):
    """The flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")

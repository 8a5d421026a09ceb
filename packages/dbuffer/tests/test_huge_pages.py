"""Large memory on the host asks for huge pages, and nothing but it."""

from pathlib import Path

import pytest
import torch

from dbuffer import Recycler
from dbuffer.memory import huge_pages

LARGE = huge_pages.SMALLEST
needs_linux = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no transparent huge pages",
)


@needs_linux
def test_the_kernel_has_noted_that_large_memory_of_a_recycler_wants_huge_pages():
    recycler, storage = Recycler("cpu"), torch.UntypedStorage(0)
    recycler.allocate(storage, 4 * LARGE)
    assert "hg" in _flags_of(storage.data_ptr() + LARGE)


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

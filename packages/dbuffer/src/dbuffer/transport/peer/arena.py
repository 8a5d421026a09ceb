"""Memory that the other processes of this machine can map: gathered memory on the host.

All of it is in one file without a name (`memfd`), larger than the memory but sparse, mapped once. A peer gets
the file over a socket and maps it once, to read; from then on a tensor is an offset. The kernel frees
the file when no process has it any more, however the processes ended.

    allocate(n)     a uint8 tensor; its range is free again when no storage holds its memory
    free ranges     keep their pages for the next `allocate`, up to 5/4 of the bytes lately in use at once, until a
                    recycler is gone

Pages are there before anybody writes to them: without memory `allocate` raises, and no signal ends the process.
A forked child has none of it: where it reads or writes there, it ends by SIGSEGV.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import torch

from ...memory.huge_pages import SMALLEST, prefer_huge_pages

_TIMES_MEMORY = 4  # size of the file, in the machine's memory: ranges of many sizes leave gaps
_LARGEST = 1 << 42  # bytes of the file: 17 mappings of it have room in a process
_LATELY = 256  # allocations
_SLACK = 4  # a quarter more than was in use at once is kept, for what does not fit
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on
_FIXED, _NORESERVE = 0x10, 0x4000  # of mmap
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
    libc.madvise.argtypes, libc.munmap.argtypes = [address, size, number], [address, size]
    return libc


def _map(nbytes: int, protection: int, flags: int, fd: int = -1, address: int | None = None) -> int:
    mapped = _libc().mmap(address, nbytes, protection, flags | _NORESERVE, fd, 0)
    if mapped == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {nbytes} bytes: {os.strerror(error)}")
    return int(mapped)


class Ranges:
    """A set of numbers as runs `[begin, end]`, in order, that do not touch."""

    def __init__(self, *runs: list[int]) -> None:
        self.runs = list(runs)

    def add(self, begin: int, end: int) -> None:
        """Add numbers that are not in it."""
        runs = []
        for run in self.runs:
            if run[1] < begin or run[0] > end:
                runs.append(run)
            else:
                begin, end = min(begin, run[0]), max(end, run[1])
        self.runs = sorted([*runs, [begin, end]])

    def remove(self, begin: int, end: int) -> None:
        """Remove the blocks that are in it."""
        parts = [part for low, high in self.runs for part in ([low, min(high, begin)], [max(low, end), high])]
        self.runs = [part for part in parts if part[0] < part[1]]

    def first(self, length: int) -> int | None:
        """Begin of the first run of this length or more."""
        return next((begin for begin, end in self.runs if end - begin >= length), None)

    def total(self) -> int:
        """How many there are."""
        return sum(end - begin for begin, end in self.runs)


class Arena:
    """The file of this process and its mapping.

    Raises:
        OSError: the platform has no such files, or refuses.
    """

    smallest = 1 << 16  # bytes; smaller memory is not worth a separate range

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this platform has no memfd_create")
        self.size = min(_TIMES_MEMORY * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, _LARGEST)
        self.fd = os.memfd_create("dbuffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            # address, size: of the mapping, in bytes
            self.address = _map(self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self.fd)
        except OSError:
            os.close(self.fd)
            raise
        _libc().madvise(self.address, self.size, mmap.MADV_DONTDUMP)  # writing a core file would take hours
        self._free = Ranges([0, self.size])
        self._with_pages = Ranges()  # of the free ones
        self._in_use = self._peak = self._peak_lately = 0  # bytes
        self._countdown = _LATELY
        self._returned: deque[tuple[int, int, bool]] = deque()  # free, not in `_free` yet; has pages
        self._lock = threading.Lock()
        self._process = os.getpid()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory, uint8, at a page's begin. Raises RuntimeError: there is no memory."""
        size = _whole_pages(nbytes)
        with self._lock:
            self._take_returned()
            begin = self._with_pages.first(size)
            has_pages = [begin is not None]  # what `_give_back` is to know of the range
            if begin is None:
                begin = self._free.first(size)
            if begin is None:
                raise RuntimeError(f"{self.size} bytes of shared memory have no free range of {nbytes} bytes")
            end = begin + size
            self._free.remove(begin, end)
            self._with_pages.remove(begin, end)
            memory = (ctypes.c_ubyte * nbytes).from_address(self.address + begin)
            weakref.finalize(memory, self._give_back, begin, end, has_pages).atexit = False
            self._count(size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if not has_pages[0]:
            if nbytes >= SMALLEST:
                prefer_huge_pages(tensor)  # given where `shmem_enabled` says `advise`
            self._populate(begin, size)
            has_pages[0] = True
        return tensor

    def _count(self, nbytes: int) -> None:
        """Count `nbytes` more as used; return pages of free ranges to the kernel if there are too many."""
        self._in_use += nbytes
        if nbytes > 0:
            self._peak_lately = max(self._peak_lately, self._in_use)
            self._peak = max(self._peak, self._in_use)
            self._countdown -= 1
        if not self._countdown:
            self._peak, self._peak_lately, self._countdown = self._peak_lately, self._in_use, _LATELY
        most = self._peak + self._peak // _SLACK // mmap.PAGESIZE * mmap.PAGESIZE
        while (surplus := self._in_use + self._with_pages.total() - most) > 0 and self._with_pages.runs:
            begin, end = self._with_pages.runs[-1]
            self._remove_pages(max(begin, end - surplus), end)

    def _remove_pages(self, begin: int, end: int) -> None:
        """Give the pages of a free range back to the kernel."""
        self._with_pages.remove(begin, end)
        if os.getpid() == self._process:  # a forked child has dropped what the parent may be using
            _libc().madvise(self.address + begin, end - begin, mmap.MADV_REMOVE)

    def trim(self) -> None:
        """Give the pages of free ranges back to the kernel."""
        if self._lock.acquire(blocking=False):  # else `allocate` is at work, which needs them
            try:
                self._peak = self._peak_lately = 0
                self._count(0)
            finally:
                self._lock.release()

    def _give_back(self, begin: int, end: int, has_pages: list[bool]) -> None:
        """The last user of a range is gone. On any thread, and amid anything that this one does.

        `has_pages` is false where `allocate` was refused or interrupted: then some of its pages may be missing.
        """
        self._returned.append((begin, end, has_pages[0]))
        if self._lock.acquire(blocking=False):
            try:
                self._take_returned()
            finally:
                self._lock.release()

    def _take_returned(self) -> None:
        while self._returned:
            begin, end, has_pages = self._returned.popleft()
            self._free.add(begin, end)
            if has_pages:
                self._with_pages.add(begin, end)
            else:
                self._remove_pages(begin, end)
            self._count(begin - end)

    def _populate(self, begin: int, size: int) -> None:
        """Allocate the pages of a range. Raises RuntimeError: there is no memory."""
        while _libc().madvise(self.address + begin, size, _POPULATE_WRITE):
            error = ctypes.get_errno()
            if error == errno.EINTR:
                continue  # a signal's handler runs first
            try:
                if error != errno.EINVAL:
                    raise OSError(error, os.strerror(error))
                os.posix_fallocate(self.fd, begin, size)  # an older kernel
            except OSError as refused:
                raise RuntimeError(f"no memory for {size} bytes for ranks to share: {refused}") from None
            return

    def offset(self, address: int, nbytes: int) -> int | None:
        """Offset of memory of this process in the file, or None if it is not there."""
        begin = address - self.address
        return begin if 0 <= begin <= self.size - nbytes else None

    def close_in_child(self) -> None:
        """Replace the mapping in a forked child: its writes must not reach the parent, nor keep the memory alive."""
        without = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        _map(self.size, 0, without, address=self.address)
        os.close(self.fd)
        self.fd = -1


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


_arena: Arena | None = None


def arena() -> Arena:
    """This process's, made by the first call. Raises OSError where that is not possible."""
    global _arena
    if _arena is None:
        _arena = Arena()
    return _arena


def offset_of(address: int, nbytes: int) -> int | None:
    """Offset of memory in this process's file, or None if it is not there."""
    return None if _arena is None else _arena.offset(address, nbytes)


class PeerFile:
    """Another process's file, mapped to be read. See `peer_file`."""

    def __init__(self, fd: int) -> None:
        self.size = os.fstat(fd).st_size
        # address, size: of the mapping, in bytes
        self.address = _map(self.size, mmap.PROT_READ, mmap.MAP_SHARED, fd)
        for advice in (mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK):  # a child would keep the memory of dead peers
            _libc().madvise(self.address, self.size, advice)
        weakref.finalize(self, _unmap, self.address, self.size, os.getpid()).atexit = False


def _unmap(address: int, size: int, process: int) -> None:
    if os.getpid() == process:
        _libc().munmap(address, size)


_peer_files: "weakref.WeakValueDictionary[tuple[int, int], PeerFile]" = weakref.WeakValueDictionary()


def peer_file(fd: int) -> PeerFile:
    """The mapping of another process's file: one, however many process groups the two are in.

    Raises:
        OSError: it cannot be mapped.
    """
    status = os.fstat(fd)
    key = status.st_dev, status.st_ino
    mapped = _peer_files.get(key)
    if mapped is None:
        mapped = _peer_files[key] = PeerFile(fd)
    return mapped


def _forget_in_child() -> None:
    global _arena
    if _arena is not None:
        _arena.close_in_child()
    _arena = None
    _peer_files.clear()


os.register_at_fork(after_in_child=_forget_in_child)

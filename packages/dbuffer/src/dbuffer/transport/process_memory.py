"""Reading another process's memory, where the kernel allows it."""

import ctypes
import functools
import os
import sys

MOST = 1 << 30  # bytes in one call; Linux stops at 2 GiB


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


@functools.cache
def system_call() -> "ctypes._NamedFuncPointer | None":
    """process_vm_readv; None where the platform has none."""
    if not sys.platform.startswith("linux"):
        return None
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is not None:
        vector = ctypes.POINTER(_Vector)
        count = ctypes.c_ulong
        read.restype = ctypes.c_ssize_t
        read.argtypes = [ctypes.c_int, vector, count, vector, count, count]
    return read


def read_memory(process: int, address: int, into: int, nbytes: int) -> None:
    """Copy bytes of another process to an address of this one.

    Args:
        process: its number, as this process sees it.
        address: where to read, in its memory.
        into: where to write, in this process's memory; must stay allocated meanwhile.

    Raises:
        OSError: the kernel refuses, or there is no such process or memory.
    """
    read = system_call()
    if read is None:
        raise OSError("this platform has no process_vm_readv")
    done = 0
    while done < nbytes:
        size = min(nbytes - done, MOST)
        got = read(process, _Vector(into + done, size), 1, _Vector(address + done, size), 1, 0)
        if got <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"reading {size} bytes of process {process}: {os.strerror(error)}")
        done += got


def machine() -> str:
    """The same for all processes of a running kernel; "" where that is not known."""
    return _read("/proc/sys/kernel/random/boot_id")


def obstacles(process: int) -> str:
    """What is known to forbid this process to read another one's memory; for a log line."""
    found = []
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    if scope not in ("", "0"):
        found.append(f"kernel.yama.ptrace_scope is {scope}, 0 would allow it")
    mode = _status("self").get("Seccomp", "0")
    if mode != "0":
        found.append(f"seccomp is on (mode {mode})")
    user = _status(str(process)).get("Uid", "").partition("\t")[0]
    if user and int(user) != os.getuid():
        found.append(f"it runs as user {user}, this rank as user {os.getuid()}")
    elif user and os.stat(f"/proc/{process}/stat").st_uid != int(user):
        found.append("it is not dumpable (prctl PR_SET_DUMPABLE; so is a process that has changed its user)")
    return "; ".join(found) or "no reason is visible: perhaps a security module"


def _status(process: str) -> dict[str, str]:
    lines = _read(f"/proc/{process}/status").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""

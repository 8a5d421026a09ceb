"""What keeps ranks of one machine from mapping each other's memory, and what does not.

Where they cannot they use collectives, and the log line says why.
"""

import ctypes
import errno
import os
import platform
import re

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import transport_lines

from dbuffer.transport import transport_of
from dbuffer.transport.peer import arena as shared
from ragged_shard.testing import RankError, run_ranks

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
CLONE_NEWNET = 0x40000000
MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
USER = 60000  # any that is not root
PEER_MEMORY = r"peer_memory \| peer_memory for large exchanges"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")


class Seen(Exception):
    """What a rank has seen. Raised, so that ranks which have changed for good are not used again."""


class _Step(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("skip_if", ctypes.c_ubyte),
        ("skip_else", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.POINTER(_Step)))


def call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def deny_files():
    """A seccomp filter, as container runtimes have: `memfd_create` fails with EPERM."""
    shared._arena = None  # a test before may have made one
    load, equal, answer = 0x20, 0x15, 0x06
    steps = (_Step * 4)(
        _Step(load, 0, 0, 0),
        _Step(equal, 0, 1, MEMFD_CREATE[platform.machine()]),
        _Step(answer, 0, 0, 0x00050000 | errno.EPERM),
        _Step(answer, 0, 0, 0x7FFF0000),
    )
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_SECCOMP, 2, ctypes.byref(_Program(4, steps)), 0, 0)


def become_other_users():
    os.setuid(USER + dist.get_rank())


def hide_memory():
    """Ranks are of one user and not dumpable."""
    os.setuid(USER)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def leave_network():
    call("unshare", CLONE_NEWNET)


def under(obstacle, ranks):
    group = dist.new_group()
    full, mine = torch.zeros(2 << 18), torch.full((1 << 18,), float(dist.get_rank()))
    dist.barrier(group=group)  # gloo connects
    if dist.get_rank() in ranks:
        obstacle()
    moving = transport_of(group, "auto")
    with transport_lines() as lines:
        for _ in range(2):
            full.fill_(-1.0)
            moving.all_gather([(full, mine)], "x").wait()
            assert torch.equal(full, torch.arange(2.0).repeat_interleave(1 << 18))
    raise Seen(f"{moving.name} | {' & '.join(lines)}")


needs_numbers = pytest.mark.skipif(
    platform.machine() not in MEMFD_CREATE, reason="the number of memfd_create is not known on this processor"
)


@pytest.mark.parametrize(
    ("obstacle", "ranks", "line"),
    [
        pytest.param(
            deny_files,
            [1],
            r"collectives \| collectives; no peer memory: rank 1: no memory that others can map .*not permitted",
            marks=needs_numbers,
        ),
        pytest.param(
            leave_network,
            [1],
            r"collectives \| collectives; no peer memory: rank 1: cannot reach rank 0 by a local socket "
            ".*another network namespace",
            marks=[as_root, pytest.mark.long],
        ),
        pytest.param(become_other_users, [0, 1], PEER_MEMORY, marks=as_root),
        pytest.param(hide_memory, [0, 1], PEER_MEMORY, marks=as_root),
    ],
    ids=["no files", "other network namespace", "other users", "not dumpable"],
)
def test_all_ranks_choose_the_same_and_one_line_says_what(obstacle, ranks, line):
    with pytest.raises(RankError) as caught:
        run_ranks(2, under, obstacle, ranks)
    # Its text: as another user a rank may not be able to read what sending the exception itself takes.
    text = str(caught.value)
    if refused := re.search("PermissionError: .*", text):  # a container's root
        pytest.skip(f"this root may not make the obstacle: {refused[0]}")
    seen = re.findall(r"Seen: (.*)", text)
    assert len(seen) == 2, text
    for choice in seen:
        assert re.match(line, choice), text

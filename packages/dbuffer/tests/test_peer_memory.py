"""Ranks of one machine map each other's memory, or agree that they cannot; and no fault gives a wrong value."""

import random
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import SIZE, load, mesh_of, peers_of, swap

import dbuffer
from dbuffer import DBuffer
from dbuffer.transport import transport_of
from dbuffer.transport.peer import handshake
from dbuffer.transport.peer.handshake import connect
from layout_planner import TensorSpec, plan
from ragged_shard.testing import on_ranks

REFUSED = mock.Mock(side_effect=OSError(1, "Operation not permitted"))
TROUBLES = [  # what a rank alone has instead of a function of the handshake
    (1, "peer_file", REFUSED, "rank 1: cannot map rank 0's memory ([Errno 1] Operation not permitted)"),
    (2, "machine", lambda: "another", "rank 2 is on another machine than rank 0"),
    (0, "_listener", lambda name, usual=handshake._listener: usual(name + "x"),
     "rank 1: cannot reach rank 0 by a local socket (Connection refused): another machine or another network "
     "namespace"),
]  # fmt: skip


@on_ranks(3)
def test_where_one_rank_cannot_connect_all_agree_and_say_why():
    """A security module refuses to map memory, a rank is on another machine, or in another network namespace."""
    for rank, name, obstacle, trouble in TROUBLES:
        function = obstacle if dist.get_rank() == rank else getattr(handshake, name)
        with mock.patch.object(handshake, name, function), mock.patch.object(handshake, "PATIENCE", 0.5):
            assert connect(dist.group.WORLD) == ({}, trouble)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_choice_by_name_that_is_not_possible_raises_on_all_ranks():
    full, mine = torch.zeros(2 << 18), torch.zeros(1 << 18)
    with (
        mock.patch.object(handshake, "arena", side_effect=OSError("this platform has no memfd_create")),
        pytest.raises(ValueError, match=r"'peer_memory' is not possible .* no memfd_create"),
    ):
        transport_of(dist.new_group(), "peer_memory").all_gather([(full, mine)], "x")


@on_ranks(2)
def test_connecting_leaves_the_users_random_numbers_alone():
    random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), torch.get_rng_state()
    peers_of()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@on_ranks(2)
def test_an_exchange_completes_when_all_have_started_it():
    """Rank 0 starts and never waits; rank 1 is done all the same."""
    peers = peers_of()
    mine, theirs = torch.full((SIZE,), float(dist.get_rank())), torch.empty(SIZE)
    work = swap(peers, mine, [theirs])
    if dist.get_rank() == 1:
        work.wait()
        assert bool((theirs == 0).all())
    dist.barrier()
    deadline = time.monotonic() + 30  # that rank 1 is done is on its way
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert work.is_completed()


@pytest.mark.parametrize(
    ("ranks", "times"), [(2, 400), (3, 400), (4, 400), pytest.param(16, 30, marks=pytest.mark.long)]
)
@on_ranks("ranks")
def test_many_exchanges_under_way_bring_each_its_own_bytes(ranks, times):
    """Ranks at different paces, several exchanges under way, each of its own size and value."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers, others = peers_of(), [r for r in range(size) if r != rank]
    generator = torch.Generator().manual_seed(rank)
    under_way = []
    for number in range(times):
        numel = 1 + number * 37 % 5000
        gives = {r: [torch.full((numel,), 1000.0 * number + 10 * rank + r)] * 2 for r in others}
        takes = {r: [torch.zeros(numel), torch.zeros(numel)] for r in others}
        under_way.append((number, takes, peers.exchange(f"n{number}", gives, takes)))
        if torch.rand((), generator=generator) < 0.05:
            time.sleep(0.002)
        while len(under_way) > 5:
            number, takes, work = under_way.pop(0)
            work.wait()
            for r, taken in takes.items():
                assert all((t == 1000.0 * number + 10 * r + rank).all() for t in taken), number
    for *_, work in under_way:
        work.wait()
    dist.barrier()


@pytest.mark.parametrize("count", [700, pytest.param(4500, marks=pytest.mark.long)])
@on_ranks(2, timeout=120)
def test_a_call_with_very_many_buffers_completes(count):
    """One call with so many buffers that what is said of them fills the sockets many times."""
    mesh, layout = mesh_of(), plan([TensorSpec("w", (1024,))], dist.get_world_size())
    buffers = [
        DBuffer(layout, mesh, dtype=torch.float32, check_ranks=False, name=f"b{i}", transport="peer_memory")
        for i in range(count)
    ]
    for index, buffer in enumerate(buffers):
        load(buffer, {"w": torch.full((1024,), float(index))})
    for _ in range(3):
        dbuffer.Gather(buffers).start().wait()
        assert all(bool((b.full[0] == index).all()) for index, b in enumerate(buffers))
        dbuffer.ReduceScatter(buffers).start().wait()
        assert all(bool((b.shard[0] == index).all()) for index, b in enumerate(buffers))
        for buffer in buffers:
            buffer.release()


@on_ranks(2)
def test_the_thread_ends_with_the_connections():
    before = set(threading.enumerate())  # an earlier test's group may have a thread of its own

    def added():
        return [t.name for t in threading.enumerate() if t.name == "dbuffer peers" and t not in before]

    for _ in range(3):
        peers = peers_of()
        theirs = torch.zeros(SIZE)
        swap(peers, torch.ones(SIZE), [theirs]).wait()
        assert bool(theirs.all())
        assert added()
        dist.barrier()
        del peers
    deadline = time.monotonic() + 60
    while added() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not added()

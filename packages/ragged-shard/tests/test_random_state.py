"""Random ops draw what one process draws; ranks compare values."""

import torch.distributed as dist

from ragged_shard.dist import (
    gather_from_ranks,
    list_ranks,
    on_all_ranks,
    raise_on_all_ranks,
    same_on_all_ranks,
)
from ragged_shard.testing import on_ranks, rank_mesh


def _message(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@on_ranks(4)
def test_the_lowest_ranks_error_is_raised_on_every_rank():
    rank = dist.get_rank()
    errors = [None, KeyError("name"), FileNotFoundError("no file"), UnicodeError("bytes")]
    groups = rank_mesh(2, 2, names=("replicate", "shard"))
    both = [groups.get_group(axis) for axis in (0, 1)]
    assert [
        _message(lambda: raise_on_all_ranks(None, "load", rank * 10)),
        _message(lambda: raise_on_all_ranks(errors[rank], "load", rank)),
        _message(lambda: raise_on_all_ranks(errors[rank] if rank == 2 else None, "load", groups=both)),
        _message(lambda: raise_on_all_ranks(errors[rank] if rank == 3 else None, "load", groups=both[::-1])),
        sorted(gather_from_ranks(rank, both)),
    ] == [
        [0, 10, 20, 30],
        "RuntimeError: load on rank 1: KeyError: 'name'",
        "FileNotFoundError: load on rank 2: no file",
        "ValueError: load on rank 3: bytes",
        [0, 1, 2, 3],
    ]


def _fail_in_a_block(values, fails):
    with on_all_ranks("train") as named:
        named.update(values)
        if fails:
            raise ValueError("bad")


@on_ranks(4)
def test_values_that_differ_are_named_with_the_ranks_of_each():
    rank = dist.get_rank()
    mesh = rank_mesh(2, 2, names=("replicate", "shard"))
    both = [mesh.get_group(axis) for axis in (0, 1)]
    pair = dist.new_group([0, 3]) if dist.get_world_size() == 4 else None
    assert [
        _message(lambda: same_on_all_ranks({"batch": 12, "seed": 1})),
        _message(lambda: same_on_all_ranks({"batch": 12, "seed": rank // 2}, both, caller="train")),
        _message(lambda: same_on_all_ranks({"batch": 12, **({"late": "yes"} if rank == 3 else {})}, both)),
        _message(lambda: same_on_all_ranks({"seed": rank}, error=ValueError("bad") if rank == 1 else None)),
        _message(lambda: _fail_in_a_block({"seed": 1}, rank == 2)),
        _message(lambda: same_on_all_ranks({"rank": rank in (0, 3)}, pair)) if rank in (0, 3) else None,
    ] == [
        None,
        "ValueError: train: ranks do not agree on seed: 0 on ranks 0, 1; 1 on ranks 2, 3",
        "ValueError: ranks do not agree on late: absent on ranks 0, 1, 2; yes on rank 3",
        "ValueError: call on rank 1: bad",
        "ValueError: train on rank 2: bad",
        None,
    ]


def test_one_process_without_process_groups():
    assert gather_from_ranks("value") == ["value"]
    assert raise_on_all_ranks(None, "load", 3) == [3]
    same_on_all_ranks({"batch": 12})


def test_ranks_in_messages():
    assert list_ranks([3]) == "rank 3"
    assert list_ranks([0, 2]) == "ranks 0, 2"
    assert list_ranks(range(9)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"

"""Tensors are found and replaced in the containers that modules take and return."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from fsdp_runtime._torch.tree import cast_to, map_tensors, tensors_in

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    value: torch.Tensor
    note: str
    extra: list | None = None


def test_every_container_is_gone_into_and_keeps_its_class():
    x = torch.ones(2)
    tree = (x, [x, 3], {"k": x}, OrderedDict(a=x), Pair(x, "s"), Output(x, "n", [x]), None)
    found = map_tensors(lambda t: t + 1, tree)
    assert len(list(tensors_in(tree))) == len(list(tensors_in(found))) == 7
    assert all(torch.equal(t, x + 1) for t in tensors_in(found))
    assert [type(item) for item in found] == [type(item) for item in tree]
    assert (found[4].right, found[5].note, found[1][1], found[6]) == ("s", "n", 3, None)


def test_what_holds_nothing_to_change_is_returned_itself():
    tree = ([torch.ones(1)], {"k": "v"}, Output(torch.ones(1), "n"))
    assert map_tensors(lambda t: t, tree) is tree


def test_only_floating_point_tensors_are_cast():
    tree = [torch.ones(1), torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)]
    found = map_tensors(cast_to(torch.bfloat16), tree)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.int64, torch.bool]
    assert map_tensors(cast_to(None), tree) is tree

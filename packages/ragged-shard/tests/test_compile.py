"""torch.compile of ops on ragged tensors (torch >= 2.12)."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ragged_shard import RaggedDTensor, RaggedShard, distribute_tensor
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh

pytestmark = pytest.mark.skipif(
    not SUBCLASSES_DTENSOR, reason="torch < 2.12: torch.compile takes no such subclass"
)


def curve(a, b):
    return (a * b + 1).sigmoid() * 2 - a


@on_ranks(3, timeout=120)
def test_a_compiled_pointwise_function_is_bit_equal_also_on_tensors_in_one_buffer():
    mesh = rank_mesh(3)
    x = torch.arange(24.0).view(6, 4) / 24
    even = distribute_tensor(x, mesh, [RaggedShard((0,), (1, 2, 3))])
    buffer = torch.zeros(60)
    pair = []
    for start in (3, 30):
        local = buffer[start : start + even.to_local().numel()].view(-1, 4).copy_(even.to_local())
        pair.append(RaggedDTensor.from_local(local, mesh, even.placements, shape=(6, 4)))
    compiled = torch.compile(curve, backend="aot_eager", fullgraph=True)
    for got in (compiled(even, even), compiled(*pair)):
        assert isinstance(got, RaggedDTensor)
        assert got.placements == even.placements
        assert torch.equal(got.to_local(), curve(even.to_local(), even.to_local()))
        torch.testing.assert_close(got.full_tensor(), curve(x, x))  # a CPU may use another vector loop
    fake = FakeTensorMode().from_tensor(pair[0])
    assert isinstance(fake, RaggedDTensor)
    assert fake.shape == (6, 4)
    assert fake.to_local().shape == pair[0].to_local().shape

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


def assert_compiled_bits(got, x, ragged):
    """Bits of the eager function on the local shard; on the whole tensor a CPU may use another vector loop."""
    assert torch.equal(got.to_local(), curve(ragged.to_local(), ragged.to_local()))
    torch.testing.assert_close(got.full_tensor(), curve(x, x))


@on_ranks(3, timeout=120)
def test_a_compiled_pointwise_function_is_bit_equal():
    mesh = rank_mesh(3)
    x = torch.arange(24.0).view(6, 4) / 24
    ragged = distribute_tensor(x, mesh, [RaggedShard((0,), (1, 2, 3))])
    got = torch.compile(curve, backend="aot_eager", fullgraph=True)(ragged, ragged)
    assert isinstance(got, RaggedDTensor)
    assert got.placements == ragged.placements
    assert_compiled_bits(got, x, ragged)


@on_ranks(3, timeout=120)
def test_tensors_in_one_buffer_are_compiled_too():
    mesh = rank_mesh(3)
    x = torch.arange(24.0).view(6, 4) / 24
    even = distribute_tensor(x, mesh, [RaggedShard((0,), (1, 2, 3))])
    buffer = torch.zeros(60)
    pair = []
    for start in (3, 30):
        local = buffer[start : start + even.to_local().numel()].view(-1, 4).copy_(even.to_local())
        pair.append(RaggedDTensor.from_local(local, mesh, even.placements, shape=(6, 4)))
    got = torch.compile(curve, backend="aot_eager", fullgraph=True)(*pair)
    assert_compiled_bits(got, x, even)
    fake = FakeTensorMode().from_tensor(pair[0])
    assert isinstance(fake, RaggedDTensor)
    assert fake.shape == (6, 4)
    assert fake.to_local().shape == pair[0].to_local().shape

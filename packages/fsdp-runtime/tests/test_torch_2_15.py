"""FSDP2's additions in torch 2.15 that `conformance` has no case for: kept memory, and dtypes of gradients.

Torch 2.13 has neither in FSDP2, so expected values are those of one process. From the source of torch 2.15:

    set_keep_unsharded_storage    reshard frees no storage: data pointers stay, for CUDA graphs
    grad_dtype                    of a parameter before fully_shard: dtype of its sharded gradient. Unsharded ones add
                                  up in reduce_dtype, else in grad_dtype
"""

import gc
from typing import Any

import torch
from runtime_helpers import (
    loss_of,
    on_meta,
    seeded,
    shard,
    tokens,
)
from torch import nn

from fsdp_runtime import MixedPrecisionPolicy, fully_shard
from fsdp_runtime.memory import gathered_memory
from ragged_shard.testing import on_ranks

# -- set_keep_unsharded_storage ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_memory_is_kept_between_steps_until_it_is_switched_off():
    gc.collect()  # models of other tests, which share the recycler
    model = shard(on_meta())
    whole, before = sum(param.numel() for param in model.parameters()) * 4, gathered_memory(model).lent_bytes
    for keep in (True, False, True):
        model.set_keep_unsharded_storage(keep)
        if model.embed.weight.is_meta:
            model.to_empty(device="cpu")
            model.load_state_dict(seeded().state_dict())
        model.reshard()
        loss_of(model, tokens()).backward()
        assert (gathered_memory(model).lent_bytes - before >= whole) == keep


# -- grad_dtype --------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Uses one weight twice, so that autograd adds its gradients."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.inner(torch.tanh(self.inner(x))))


def inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(6, 8, generator=generator).to(torch.bfloat16)


@on_ranks(2)
def test_gradients_add_up_in_the_dtype_of_the_reduction_before_they_get_their_own():
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model: Any = Shared()
    model.inner.weight.grad_dtype = torch.bfloat16
    single, model = seeded(Shared), fully_shard(model, mp_policy=policy)
    single.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        model(inputs(number).float()).sum().backward()
        single(inputs(number).float()).sum().backward()
    grad = model.inner.weight.grad
    assert grad.dtype == torch.bfloat16
    assert torch.equal(grad.full_tensor(), single.inner.weight.grad.to(torch.bfloat16))

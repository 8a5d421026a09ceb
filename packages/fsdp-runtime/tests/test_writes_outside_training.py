"""Parameters written outside the optimizer's step: the next forward computes with what was written."""

import pytest
import torch
from runtime_helpers import seeded, shard, tokens

from fsdp_runtime import QuantizationPolicy
from fsdp_runtime.quantization import BlockFP8
from ragged_shard.testing import on_ranks


def load(model, _):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def uncounted(_, params):
    for p in params:
        p.to_local().data.mul_(2)
        torch.autograd.graph.increment_version(p.to_local())  # as the docstring of QuantizationPolicy says


WRITES = {
    "in place": lambda _, params: [p.mul_(2) for p in params],
    "through .data": lambda _, params: [p.data.mul_(2) for p in params],
    "copy_": lambda _, params: [p.copy_(p * 2) for p in params],
    "the local tensor": lambda _, params: [p.to_local().mul_(2) for p in params],
    "foreach": lambda _, params: torch._foreach_mul_(params, 2.0),
    "load_state_dict": load,
    "a write that torch does not count": uncounted,
}
CUTS = {"codes of whole tiles": "whole", "codes of shared tiles": "shared", "units that stay gathered": None}


def written(how, cut=None):
    """Outputs after a write, of this model and of one that was sharded with what was written."""
    options = (
        {"quantization_policy": QuantizationPolicy(weights=BlockFP8((4, 4)), cut=cut)}
        if cut
        else {"reshard_after_forward": False}
    )
    model, wanted = seeded(width=24), seeded(width=24)
    model = shard(model, **options)
    params = list(model.parameters())  # sharded: what an optimizer has
    with torch.no_grad():
        model(tokens())
        WRITES[how](model, params)
        found = model(tokens())
        for p in wanted.parameters():
            p.mul_(2)
        expected = shard(wanted, **options)(tokens())
    assert torch.equal(found, expected), (how, cut)


@pytest.mark.parametrize("kind", CUTS)
@on_ranks(3)
def test_a_write_outside_training_is_seen_by_the_next_forward(kind):
    cut = CUTS[kind]
    for how in WRITES:
        written(how, cut)

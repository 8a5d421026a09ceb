"""Gradients that come and go, on ranks that hold nothing of some parameters, or of any."""

import logging
from typing import Any

import pytest
import torch
from runs import Run, same

from block_optim import SOAP, AdamW, AdamW8bit, Mixed, Muon, Shampoo
from layout_planner import Elements
from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.testing import run_ranks

SHAPES = ((24, 16), (13, 8), (3, 8, 6))
SMALL = {"max_preconditioner_dim": 4, "precondition_frequency": 2}
# Of which parameters there is no gradient, step by step.
COME_AND_GO = ((), (0, 1, 2), (), (1,), (0, 2), (0, 1, 2), (0, 1, 2), ())


def mixed(named, lr):
    kinds = ("muon", "soap", "adamw")
    return Mixed([{"params": [p], "algorithm": k} for p, k in zip(named, kinds, strict=True)], lr=lr)


def mixed_too(named, lr):
    kinds = ("shampoo", "adamw8bit", "muon")
    return Mixed([{"params": [p], "algorithm": k} for p, k in zip(named, kinds, strict=True)], lr=lr)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "AdamW, fused and with masters": (
        AdamW,
        {"fused": True, "master_weights": True, "dtype": torch.bfloat16},
    ),
    "AdamW8bit": (AdamW8bit, {"block": Elements(16), "min_8bit_numel": 1}),
    "Muon": (Muon, {}),
    "NorMuon in bf16": (Muon, {"normuon": True, "momentum_dtype": torch.bfloat16}),
    "Shampoo": (Shampoo, SMALL),
    "Shampoo, next to the step": (Shampoo, {**SMALL, "overlap": True}),
    "SOAP": (SOAP, SMALL),
    "Mixed": (mixed, {}),
    "Mixed, the others": (mixed_too, {}),
}


class OnOneRank(Run):
    """The last rank holds everything, the others nothing of anything."""

    def put(self, values):
        if self.mesh is None:
            return super().put(values)
        units = [0] * (self.mesh.size() - 1) + [1]
        return [
            distribute_tensor(v, self.mesh, [RaggedShard((0,), units)], src_data_rank=None) for v in values
        ]


def trained(name, layout="plain", run=Run):
    kind, options = KINDS[name]
    found = run(kind, layout, shapes=SHAPES, lr=0.1, **options)
    for number, without in enumerate(COME_AND_GO):
        found.step(number, without)
    return found.result()


def every_layout(name, expected):
    logging.getLogger("block_optim").setLevel(logging.ERROR)
    same(trained(name, "whole", OnOneRank), expected)
    if "8bit" not in name and "others" not in name:
        same(trained(name, "rows"), expected)
        same(trained(name, "shard"), expected)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_may_come_and_go_on_ranks_that_hold_nothing(world_size, name):
    run_ranks(world_size, every_layout, name, trained(name))

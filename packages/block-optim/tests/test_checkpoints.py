"""Distributed checkpoints of every optimizer: saved at one world size and layout, they go on at another to the bit."""

import logging
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from muon_helpers import full, placed, tensors, world_mesh
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from block_optim import SOAP, AdamW, AdamW8bit, Mixed, Muon, Shampoo
from layout_planner import Elements, Rows, TensorSpec, Tile, plan
from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.testing import run_ranks

SHAPES = ((24, 16), (13, 8), (3, 8, 6), (9,))
SMALL = {"max_preconditioner_dim": 4, "precondition_frequency": 2}
CASES = {  # an optimizer, its options, and the layouts that it can have
    "AdamW": (AdamW, {}, ("elements", "rows", "shard")),
    "AdamW8bit": (AdamW8bit, {"block": Elements(32), "min_8bit_numel": 1}, ("planned",)),
    "AdamW8bit in tiles": (AdamW8bit, {"block": Tile(4, 8), "min_8bit_numel": 10}, ("planned",)),
    "Muon": (Muon, {}, ("elements", "shard", "planned")),
    "NorMuon": (Muon, {"normuon": True, "momentum_dtype": torch.int8}, ("rows", "shard", "whole")),
    "Shampoo": (Shampoo, {"betas": (0.9, 0.95), "momentum": 0.9, **SMALL}, ("elements", "shard", "planned")),
    "Shampoo, qr": (
        Shampoo,
        {"root_method": "qr", "overlap": True, "diagonal_above": 20, "grafting": "sgd", **SMALL},
        ("elements", "shard", "planned"),
    ),
    "SOAP": (SOAP, {"diagonal_above": 20, **SMALL}, ("elements", "shard", "planned")),
    "Mixed": (Mixed, {}, ("elements", "shard", "rows")),
}


class Run:
    """Parameters in a layout under an optimizer; steps take gradients from the step's number."""

    def __init__(self, case, layout, seed=0):
        self.kind, options, _ = CASES[case]
        self.layout, self.seed = layout, seed
        self.shapes = SHAPES[:3] if self.kind is Muon else SHAPES
        self.mesh = None if layout == "plain" else world_mesh()
        self.units = self.planned_units(options) if layout == "planned" else ()
        self.module = torch.nn.Module()
        for i, weight in enumerate(self.put(tensors(self.shapes, 0))):
            self.module.register_parameter(f"p{i}", torch.nn.Parameter(weight))
        named = list(self.module.named_parameters())
        if self.kind is Mixed:
            matrices, rest = named[:2], named[2:]
            groups = [{"params": matrices, "algorithm": "muon"}, {"params": rest, "algorithm": "adamw"}]
            self.optimizer = Mixed(groups, lr=0.1)
        else:
            self.optimizer = self.kind(named, lr=0.1, **options)

    def planned_units(self, options):
        policy = self.kind.block_policy(**options)
        blocks = [policy(f"p{i}", torch.empty(shape)) or Rows(1) for i, shape in enumerate(self.shapes)]
        specs = [TensorSpec(f"p{i}", s, b) for i, (s, b) in enumerate(zip(self.shapes, blocks, strict=True))]
        ranks = range(self.mesh.size())
        layout = plan(specs, len(ranks), align=1)
        ranges = [[layout.local_range(spec.name, rank) for rank in ranks] for spec in specs]
        return [[stop - start for start, stop in found] for found in ranges]

    def put(self, values):
        if self.layout == "planned":
            dims = [RaggedShard(range(v.ndim), units) for v, units in zip(values, self.units, strict=True)]
            return [distribute_tensor(v, self.mesh, [p]) for v, p in zip(values, dims, strict=True)]
        return [
            placed(v, self.mesh, self.layout, random.Random(f"{i} {self.seed}")) for i, v in enumerate(values)
        ]

    def steps(self, first, last):
        for number in range(first, last):
            for p, grad in zip(
                self.module.parameters(), self.put(tensors(self.shapes, 100 + number)), strict=True
            ):
                p.grad = grad
            self.optimizer.step()
        self.optimizer.state_dict()  # waits for what runs next to the step, as a checkpoint does

    def result(self):
        """Parameters and states, in full."""
        found = {name: full(p.detach()) for name, p in self.module.named_parameters()}
        for name, p in self.module.named_parameters():
            found |= {f"{name} {key}": full(value) for key, value in self.optimizer.state[p].items()}
        return {name: value.clone() for name, value in found.items()}

    def state(self, options):
        return {
            "model": {name: p.detach() for name, p in self.module.named_parameters()},
            "optimizer": get_optimizer_state_dict(self.module, self.optimizer, options=options),
        }


def save(case, layout, folder, options):
    run = Run(case, layout)
    run.steps(0, 3)
    dcp.save(run.state(options), checkpoint_id=folder)


def load_and_go_on(case, layout, folder, options):
    run = Run(case, layout, seed=1)
    run.steps(50, 51)  # something to be overwritten
    state = run.state(options)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(run.module, run.optimizer, state["optimizer"], options=options)
    loaded = run.result()
    run.steps(3, 6)
    result = run.result()
    return (loaded, result) if not dist.get_rank() else None


def same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_on_at_another_world_size_and_layout_to_the_bit(case, flatten, tmp_path, caplog):
    caplog.set_level(logging.ERROR, "block_optim")
    options, layouts = StateDictOptions(flatten_optimizer_state_dict=flatten), CASES[case][2]
    single = Run(case, "plain")
    single.steps(0, 3)
    saved = single.result()
    single.steps(3, 6)
    run_ranks(3, save, case, layouts[0], str(tmp_path), options)
    for world_size, layout in zip((2, 4, 1), (*layouts[1:], *layouts), strict=False):
        loaded, result = run_ranks(world_size, load_and_go_on, case, layout, str(tmp_path), options)[0]
        same(loaded, saved)
        same(result, single.result())

"""Distributed checkpoints of every optimizer: saved at one world size and layout, they go on at another to the bit."""

import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runs import Run, same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from block_optim import SOAP, AdamW, AdamW8bit, Mixed, Muon, Shampoo
from layout_planner import Elements, Tile
from ragged_shard.testing import run_ranks

SHAPES = ((24, 16), (13, 8), (3, 8, 6), (9,))


def mixed(named, lr):
    """Matrices to Muon, stacks and vectors to AdamW."""
    groups = [{"params": named[:2], "algorithm": "muon"}, {"params": named[2:], "algorithm": "adamw"}]
    return Mixed(groups, lr=lr)


def preconditioned(named, lr):
    """Matrices to Shampoo and Muon, stacks and vectors to SOAP."""
    shampoo = {"algorithm": "shampoo", **small(overlap=True)}
    groups = [{"params": named[:1], **shampoo}, {"params": named[1:2], "algorithm": "muon"}]
    return Mixed([*groups, {"params": named[2:], "algorithm": "soap", **small()}], lr=lr)


def small(**options):
    return {"max_preconditioner_dim": 4, "precondition_frequency": 2, **options}


MASTERS = {"dtype": torch.bfloat16, "master_weights": True}

# An optimizer, its options, and the layouts that it is saved and loaded in.
CASES = {
    "AdamW": (AdamW, {}, ("elements", "rows", "shard")),
    "AdamW8bit": (AdamW8bit, {"block": Elements(32), "min_8bit_numel": 1}, ("planned",)),
    "AdamW8bit in tiles": (AdamW8bit, {"block": Tile(4, 8), "min_8bit_numel": 10}, ("planned",)),
    "Muon": (Muon, {}, ("elements", "shard", "planned")),
    "NorMuon": (Muon, {"normuon": True, "momentum_dtype": torch.bfloat16}, ("rows", "shard", "whole")),
    "Shampoo": (Shampoo, small(betas=(0.9, 0.95), momentum=0.9), ("elements", "shard", "planned")),
    "Shampoo, qr": (
        Shampoo,
        small(root_method="newton", overlap=True, diagonal_above=20, grafting="rmsprop"),
        ("elements", "shard", "planned"),
    ),
    "SOAP": (SOAP, small(diagonal_above=20), ("elements", "shard", "planned")),
    "Mixed": (mixed, {}, ("elements", "shard", "rows")),
    "AdamW, masters": (AdamW, MASTERS, ("elements", "rows", "shard")),
    "AdamW8bit, masters": (
        AdamW8bit,
        {"block": Elements(32), "min_8bit_numel": 100, **MASTERS},
        ("planned",),
    ),
    "Muon, masters": (Muon, MASTERS, ("elements", "shard", "planned")),
    "Muon, rounded at random": (
        Muon,
        {"dtype": torch.bfloat16, "stochastic_rounding": True},
        ("elements", "shard", "planned"),
    ),
    "Shampoo, masters": (Shampoo, small(betas=(0.9, 0.95), **MASTERS), ("elements", "shard", "planned")),
    "SOAP, masters": (SOAP, small(**MASTERS), ("elements", "shard", "planned")),
    "Mixed of Shampoo, Muon, SOAP": (preconditioned, {}, ("elements", "shard", "rows")),
}


def run_of(case, layout="plain", cuts=0):
    kind, options, _ = CASES[case]
    return Run(kind, layout, shapes=SHAPES[:3] if kind is Muon else SHAPES, cuts=cuts, lr=0.1, **options)


def checkpoint(run, options):
    weights = {name: p.detach() for name, p in run.module.named_parameters()}
    return {
        "model": weights,
        "optimizer": get_optimizer_state_dict(run.module, run.optimizer, options=options),
    }


def save(case, layout, folder, options):
    dcp.save(checkpoint(run_of(case, layout).steps(0, 3), options), checkpoint_id=folder)


def load_and_go_on(case, layout, folder, options):
    run = run_of(case, layout, cuts=1).steps(50, 51)  # something to be overwritten
    state = checkpoint(run, options)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(run.module, run.optimizer, state["optimizer"], options=options)
    loaded, result = run.result(), run.steps(3, 6).result()
    return (loaded, result) if not dist.get_rank() else None


# Every second case is saved in torch's flattened form.
@pytest.mark.parametrize(("case", "flatten"), [(case, bool(i % 2)) for i, case in enumerate(CASES)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_checkpoint_goes_on_at_another_world_size_and_layout_to_the_bit(
    case, flatten, ranks, tmp_path, caplog
):
    caplog.set_level(logging.ERROR, "block_optim")
    if ranks == 4:
        flatten = not flatten
    options, layouts = StateDictOptions(flatten_optimizer_state_dict=flatten), CASES[case][2]
    single = run_of(case).steps(0, 3)
    single.optimizer.state_dict()  # waits for what runs next to the step, as saving does
    saved = single.result()
    single.steps(3, 6)
    run_ranks(3, save, case, layouts[0], str(tmp_path), options)
    layout = (*layouts[1:], *layouts * 3)[(2, 4, 1).index(ranks)]
    loaded, result = run_ranks(ranks, load_and_go_on, case, layout, str(tmp_path), options)[0]
    same(loaded, saved)
    same(result, single.result())

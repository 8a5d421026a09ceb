"""Distributed checkpoints of every optimizer: saved at one world size and layout, they go on at another to the bit."""

import logging

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runs import NARROW, run_of, same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ragged_shard import full_optimizer_state_dict
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import run_ranks

SHAPES = ((24, 16), (13, 8), (3, 8, 6), (9,))
ANY = ("elements", "shard", "planned")

# The layouts that each is saved in (the first one) and loaded in.
CASES = {
    "AdamW": ("elements", "rows", "shard"),
    "AdamW8bit": ("planned",),
    "AdamW8bit tiles": ("planned",),
    "Muon": ANY,
    "NorMuon": ("rows", "shard", "whole", "replicas"),
    "NorMuon buckets": ("replicas", "replicas", "rows"),
    "Shampoo": ANY,
    "Shampoo sums": ("replicas", *ANY),
    "SOAP": ("replicas", "replicas", "shard"),
    "SOAP diagonal": (*ANY, "replicas"),
    "Mixed": ("elements", "shard", "rows"),
    "Mixed 8-bit": ("planned", "whole"),
    **{f"Muon, {narrow}": ANY for narrow in NARROW},
}


def checkpoint_run(case, layout="plain", cuts=0):
    if dist.is_initialized():  # costs of layouts
        logging.getLogger("block_optim").setLevel(logging.ERROR)
    shapes = SHAPES[:3] if "uon" in case or "Mixed" in case else SHAPES
    return run_of(case, layout, shapes=shapes, cuts=cuts)


def checkpoint(run, options=None):
    weights = {name: p.detach() for name, p in run.module.named_parameters()}
    return {
        "model": weights,
        "optimizer": get_optimizer_state_dict(run.module, run.optimizer, options=options),
    }


def save(case, layout, folder, options):
    """Save, and return what one process needs to go on."""
    run = checkpoint_run(case, layout).steps(0, 3)
    dcp.save(checkpoint(run, options), checkpoint_id=folder)
    if not SUBCLASSES_DTENSOR:  # torch < 2.12: torch's full-state-dict helper sees no DTensor
        return full_optimizer_state_dict(run.module, run.optimizer), run.result()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(run.module, run.optimizer, options=whole), run.result()


def load_and_go_on(case, layout, folder, options):
    run = checkpoint_run(case, layout, cuts=1).steps(50, 51)  # something to be overwritten
    state = checkpoint(run, options)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(run.module, run.optimizer, state["optimizer"], options=options)
    loaded, result = run.result(), run.steps(3, 6).result()
    return (loaded, result) if not dist.get_rank() else None


USUAL = ("AdamW", "AdamW8bit tiles", "NorMuon", "SOAP diagonal", "Mixed 8-bit", "Shampoo sums")


# Every second case is saved in torch's flattened form.
@pytest.mark.parametrize(
    ("case", "flatten"),
    [
        pytest.param(case, bool(i % 2), marks=() if case in USUAL else pytest.mark.long)
        for i, case in enumerate(CASES)
    ],
)
def test_a_checkpoint_goes_on_at_other_world_sizes_and_layouts_to_the_bit(case, flatten, tmp_path):
    options, layouts = StateDictOptions(flatten_optimizer_state_dict=flatten), CASES[case]
    single = checkpoint_run(case).steps(0, 3)
    saved, expected = single.result(), single.steps(3, 6).result()
    whole, values = run_ranks(3, save, case, layouts[0], str(tmp_path), options)[0]
    same(values, saved)
    for i, ranks in enumerate((2, 4), 1):
        layout = layouts[i % len(layouts)]
        loaded, result = run_ranks(ranks, load_and_go_on, case, layout, str(tmp_path), options)[0]
        same(loaded, saved)
        same(result, expected)
    alone = checkpoint_run(case).steps(50, 51)
    alone.module.load_state_dict({name: values[name] for name in alone.module.state_dict()})
    set_optimizer_state_dict(
        alone.module, alone.optimizer, whole, options=StateDictOptions(full_state_dict=True)
    )
    same(alone.steps(3, 6).result(), expected)

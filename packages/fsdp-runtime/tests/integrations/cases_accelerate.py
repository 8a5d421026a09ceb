"""Accelerate: FSDP2 by its `prepare`, ours by `shard` before it."""

import torch
import torch.distributed as dist
from test_accelerate import llama, prepared, train

from fsdp_runtime.integrations import accelerate as ours

PACKAGE, EXTRA, TITLE, RANKS = "accelerate", "accelerate", "Accelerate", 2


def run(system, folder):
    """Numbers of this rank by case."""
    from torch.distributed.fsdp import StateDictType

    found = {}
    for case, kind in (
        ("resume, sharded", StateDictType.SHARDED_STATE_DICT),
        ("resume, full", StateDictType.FULL_STATE_DICT),
    ):
        made = prepared(system, state_dict_type=kind)
        numbers, _ = train(*made, steps=range(2))
        made[0].save_state(str(folder / kind.name))
        again = prepared(system, model=llama(seed=5), state_dict_type=kind)
        load = ours.load_state if system == "ours" else type(again[0]).load_state
        load(again[0], str(folder / kind.name))
        found[case] = train(*again, steps=range(2, 4))[0][::2]
    rest, _ = train(*made, steps=range(2, 4))
    found["loss"], found["clip"] = (numbers + rest)[::2], (numbers + rest)[1::2]
    state = made[0].get_state_dict(made[1])
    found["save"] = [float(torch.linalg.vector_norm(value)) for value in state.values()]
    found["save"].append(float(dist.get_rank()))  # others than rank 0 have nothing else
    losses, reductions = train(*prepared(system, accumulate=2))
    found["accumulation"] = [*losses[::2], *(bool(count) for count in reductions)]
    return found

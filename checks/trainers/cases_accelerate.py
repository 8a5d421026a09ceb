"""Accelerate: FSDP2 by its `prepare`, ours by `shard` before it."""

import torch
import torch.distributed as dist
from runtime_helpers import llama
from test_accelerate import prepared, train

from fsdp_runtime.integrations import accelerate as ours

PACKAGE, TITLE, RANKS = "accelerate", "Accelerate", 2


def run(system, folder):
    from torch.distributed.fsdp import StateDictType

    found = {}
    for case, kind in (
        ("resume, sharded", StateDictType.SHARDED_STATE_DICT),
        ("resume, full", StateDictType.FULL_STATE_DICT),
    ):
        path = str(folder / kind.name)
        accelerator, model, optimizer = prepared(system, state_dict_type=kind)
        numbers, _ = train(accelerator, model, optimizer, range(2))
        accelerator.save_state(path)
        rest, _ = train(accelerator, model, optimizer, range(2, 4))
        accelerator, other, optimizer = prepared(system, model=llama(seed=5), state_dict_type=kind)
        load = ours.load_state if system == "ours" else type(accelerator).load_state
        load(accelerator, path)
        found[case] = train(accelerator, other, optimizer, range(2, 4))[0][::2]
    found["loss"], found["clip"] = (numbers + rest)[::2], (numbers + rest)[1::2]
    state = accelerator.get_state_dict(model)
    found["save"] = [float(torch.linalg.vector_norm(value)) for value in state.values()]
    found["save"].append(float(dist.get_rank()))  # others than rank 0 have nothing else
    losses, reductions = train(*prepared(system, accumulate=2))
    found["accumulation"] = [*losses[::2], *(bool(count) for count in reductions)]
    return found

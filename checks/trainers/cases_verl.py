"""verl: FSDP2 by its `FSDPEngine`, ours by the same engine with our `fully_shard`."""

import torch
from test_verl import engine_of, train

from ragged_shard.testing import record_collectives

PACKAGE, TITLE, RANKS = "verl", "verl", 2


def run(system, folder):
    """Numbers of this rank by case. verl's steps are of two microbatches here."""
    from safetensors.torch import load_file

    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    engine = engine_of(folder, system, save=["hf_model"])
    numbers = train(engine, range(2))
    engine.save_checkpoint(str(folder / "saved"))
    exported = folder / "saved" / "huggingface"
    saved = load_file(exported / "model.safetensors")
    found["save"] = [float(torch.linalg.vector_norm(saved[name])) for name in sorted(saved)]
    numbers += train(engine, range(2, 4))
    again = engine_of(folder, system)
    again.load_checkpoint(str(folder / "saved"))
    steps = {"resume, sharded": train(again, range(2, 4))}
    steps["resume, full"] = train(engine_of(folder, system, path=str(exported)), range(2, 4))
    for case, seen in steps.items():  # two losses and a norm a step
        found[case] = [seen[i] for i in range(len(seen)) if i % 3 != 2]
    found["loss"] = [numbers[i] for i in range(len(numbers)) if i % 3 != 2]
    found["clip"] = numbers[2::3]
    engine = engine_of(folder, system)
    with record_collectives() as record:
        losses = train(engine, range(2))
    found["accumulation"] = [*losses, sum("reduce_scatter" in kind for kind in record.kinds)]
    return found

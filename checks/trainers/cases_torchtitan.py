"""torchtitan: FSDP2 by its own parallelize function, ours by the same function with our `fully_shard`."""

import torch
import torch.distributed as dist
from test_torchtitan import on_cpu, set_weights, spec_of, trainer_of

from ragged_shard.testing import record_collectives

PACKAGE, TITLE, RANKS = "torchtitan", "torchtitan", 2


def _reductions(trainer):
    """A list that gets, for each microbatch to come, whether it reduces gradients."""
    found: list[bool] = []
    theirs = trainer.forward_backward_step

    def forward_backward_step(**named):
        with record_collectives() as record:
            loss = theirs(**named)
        found.append(any("reduce_scatter" in kind for kind in record.kinds))
        return loss

    trainer.forward_backward_step = forward_backward_step
    return found


def run(system, folder):
    on_cpu()
    from safetensors.torch import load_file
    from torchtitan.components.checkpoint import CheckpointManager

    def trainer_in(name, seed=0, **options):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        saving = {"enable": True, "interval": 2, "last_save_model_only": False, **options.pop("saving", {})}
        spec = spec_of("llama3", system, transport="collectives")  # which can be counted
        checkpoint = CheckpointManager.Config(**saving)
        return trainer_of(path, spec, seed=seed, checkpoint=checkpoint, **options)

    found = {}
    trainer = set_weights(trainer_in("sharded"))
    numbers = trainer.steps(2)
    trainer.checkpointer.save(2)
    numbers += trainer.steps(2)
    trainer.close()
    found["loss"], found["clip"] = numbers[::2], numbers[1::2]
    again = trainer_in("sharded", seed=5)
    again.checkpointer.load()
    found["resume, sharded"] = again.steps(2)[::2]
    again.close()

    exporting = {"last_save_model_only": True, "last_save_in_hf": True}
    trainer = set_weights(trainer_in("exported", saving=exporting))
    trainer.steps(2)
    trainer.checkpointer.save(2, last_step=True)
    trainer.close()
    dist.barrier()
    path = folder / "exported" / "checkpoint" / "step-2"
    (file,) = path.glob("*.safetensors")
    saved = load_file(file)
    found["save"] = [float(torch.linalg.vector_norm(saved[name])) for name in sorted(saved)]
    again = trainer_in("full", 5, saving={"initial_load_path": str(path), "initial_load_in_hf": True})
    again.checkpointer.load()
    found["resume, full"] = again.steps(2)[::2]
    again.close()

    trainer = set_weights(trainer_in("accumulating", accumulate=2))
    reductions = _reductions(trainer)
    found["accumulation"] = [*trainer.steps(2)[::2], *reductions]
    trainer.close()
    return found

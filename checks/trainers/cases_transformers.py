"""transformers' Trainer: FSDP2 by `fsdp=True`, ours by the mixin before it."""

import torch
import torch.distributed as dist
from runtime_helpers import llama
from test_transformers_trainer import trainer_for

PACKAGE, TITLE, RANKS = "transformers", "transformers.Trainer", 2


def logged(trainer, key):
    """One of the trainer's figures, step by step."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def run(system, folder):
    from safetensors.torch import load_file

    found = {}
    saving = {"save_strategy": "steps", "save_steps": 2}
    for case, kind in (("resume, sharded", "SHARDED_STATE_DICT"), ("resume, full", "FULL_STATE_DICT")):
        trainer = trainer_for(system, folder / kind, llama(), kind, **saving)
        trainer.train()
        again = trainer_for(system, folder / kind, llama(seed=5), kind)
        again.train(resume_from_checkpoint=str(folder / kind / "checkpoint-2"))
        found[case] = logged(again, "loss")[-2:]
    found["loss"], found["clip"] = logged(trainer, "loss"), logged(trainer, "grad_norm")
    trainer.save_model(str(folder / "saved"))
    dist.barrier()
    saved = load_file(folder / "saved" / "model.safetensors")
    found["save"] = [float(torch.linalg.vector_norm(value)) for value in saved.values()]
    trainer = trainer_for(system, folder / "both", llama(), gradient_accumulation_steps=2)
    trainer.train()
    found["accumulation"] = [*logged(trainer, "loss"), *(bool(count) for count in trainer.reductions)]
    return found

"""Lightning Fabric: FSDP2 by its `ModelParallelStrategy` and torch's fully_shard, ours by our strategy."""

import torch
import torch.distributed as dist
from test_fabric import prepared, train

PACKAGE, TITLE, RANKS = "lightning_fabric", "Lightning Fabric", 2


def run(system, folder):
    found = {}
    for case, sharded in (("resume, sharded", True), ("resume, full", False)):
        options = {"save_distributed_checkpoint": sharded}
        made = prepared(system, **options)
        numbers, _ = train(made, range(2))
        made[0].save(folder / case, {"model": made[1], "optimizer": made[2]})
        again = prepared(system, seed=5, **options)
        again[0].load(folder / case, {"model": again[1], "optimizer": again[2]})
        found[case] = train(again, range(2, 4))[0][::2]
    dist.barrier()
    saved = torch.load(folder / "resume, full", weights_only=True)["model"]
    found["save"] = [float(torch.linalg.vector_norm(value)) for value in saved.values()]
    rest, _ = train(made, range(2, 4))
    found["loss"], found["clip"] = (numbers + rest)[::2], (numbers + rest)[1::2]
    losses, reductions = train(prepared(system), range(4), 2)
    found["accumulation"] = [*losses[::2], *(bool(count) for count in reductions)]
    return found

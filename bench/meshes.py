"""block-optim: whether the mesh decides the precision of 8-bit states, in torchao's AdamW8bit and in ours.

python -m bench meshes      prints a table and writes bench/results/meshes.json; needs torchao

One weight of 64 x 96 on torch's `fully_shard`, replicated over two ranks, mesh (2, 1), or cut in two, mesh (1, 2).
Both optimizers take the same two gradients. The difference is the largest between the weights of the two meshes.
"""

from typing import Any

from . import store
from .ranks import launch

SHAPE = (64, 96)
MESHES = ((2, 1), (1, 2))


def optimizers() -> dict[str, Any]:
    """By name; torchao's where it installs."""
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit

    from block_optim import AdamW8bit

    return {"torchao": TorchaoAdamW8bit, "block-optim": AdamW8bit}


def states_on(request: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """For each optimizer, what its first moment is made of and the weight after two steps."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    result, mesh_shape = {}, request["mesh"]
    for name, kind in optimizers().items():
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")))
        optimizer = kind(
            list(model.named_parameters()) if name == "block-optim" else model.parameters(), lr=0.01
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            full = torch.randn(SHAPE, generator=generator)
            rank = model.weight.device_mesh.get_local_rank("shard")
            local = full.chunk(mesh_shape[1])[rank].clone()
            model.weight.grad = DTensor.from_local(
                local, model.weight.device_mesh, model.weight.placements, run_check=False
            )
            optimizer.step()
        moment = optimizer.state[model.weight]["exp_avg"]
        local = getattr(moment, "_local_tensor", moment)
        codes = getattr(local, "codes", local)
        result[name] = str(codes.dtype).removeprefix("torch."), model.weight.full_tensor().detach()
    return result


def main(arguments: list[str]) -> None:
    if arguments:
        raise SystemExit(__doc__)
    first, second = (launch(states_on, 2, {"mesh": mesh}) for mesh in MESHES)
    rows = []
    for name, (dtype, weight) in first.items():
        other, twin = second[name]
        rows.append([name, dtype, other, f"{(weight - twin).abs().max().item():.1e}"])
    table = {
        "title": "8-bit AdamW on meshes that replicate and that cut",
        "text": "States of torchao's AdamW8bit and of ours on torch's fully_shard, and the largest difference"
        " between the weights of the two meshes after two steps.",
        "header": ["optimizer", "states on mesh (2, 1)", "on mesh (1, 2)", "weights differ by"],
        "rows": rows,
        "exact": True,
    }
    store.print_tables([table])
    print(f"written to {store.save('meshes', {'tables': [table]})}")

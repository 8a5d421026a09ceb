"""Graphs and graph breaks of torch.compile on sharded models, ours next to FSDP2's.

python -m bench compile [--backend inductor]        what is compiled, before or after sharding; three steps each

Two blocks, each a unit, and the rest as the root, on rank 0 of 2 simulated ranks. Losses are those of the same system
without torch.compile; a difference ends the command with 1.
"""

from typing import Any

from . import store

SYSTEMS = ("fsdp2", "ours")
HOW = ("blocks, before", "blocks, after", "model, before", "model, after")
STEPS = 3
NEAR = 1e-5  # relative, of losses


def model_of() -> Any:
    """Two blocks and a head, in classes of our own: dynamo skips the forward of torch's containers."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Any) -> Any:
            return x + self.down(self.up(x).tanh())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.head(x.tanh())

    torch.manual_seed(0)
    return Model()


def train(system: str, how: str | None, backend: str = "aot_eager") -> dict[str, Any]:
    """The losses of some steps of a system; with `how` the number of graphs and of graph breaks, by reason."""
    import torch
    import torch._dynamo.utils
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    import fsdp_runtime
    from ragged_shard.testing import simulated_ranks

    apply: Any = fsdp.fully_shard if system == "fsdp2" else fsdp_runtime.fully_shard
    what, _, when = (how or "").partition(", ")
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()

    def compile_now(moment: str) -> None:
        if when == moment:
            for module in model.blocks if what == "blocks" else [model]:
                module.compile(backend=backend)

    with simulated_ranks(2):
        mesh, model = init_device_mesh("cpu", (2,)), model_of()
        compile_now("before")
        for unit in [*model.blocks, model]:
            apply(unit, mesh=mesh)
        compile_now("after")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            loss = model(torch.randn(6, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {
        "losses": losses,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": {reason.splitlines()[0]: count for reason, count in counters["graph_break"].items()},
    }


def agree(one: list[float], other: list[float]) -> bool:
    """Whether losses are the same, up to rounding."""
    return all(abs(a - b) <= NEAR * abs(b) for a, b in zip(one, other, strict=True))


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = store.parser_of("compile", __doc__)
    parser.add_argument("--backend", default="aot_eager", choices=("eager", "aot_eager", "inductor"))
    options = parser.parse_args(arguments)
    eager = {system: train(system, None)["losses"] for system in SYSTEMS}
    rows, differ = [], []
    for how in HOW:
        results = {system: train(system, how, options.backend) for system in SYSTEMS}
        differ += [f"{s}, {how}" for s in SYSTEMS if not agree(results[s]["losses"], eager[s])]
        rows.append([how])
        for system in SYSTEMS:
            rows[-1] += [str(results[system]["graphs"]), str(sum(results[system]["breaks"].values()))]
    print(store.table(["compiled", *(f"{s}: {w}" for s in SYSTEMS for w in ("graphs", "breaks"))], rows))
    print("Losses differ from eager: " + "; ".join(differ) if differ else "Losses are those of eager.")
    return 1 if differ else 0

"""How often the host waits for the device in a training step: counted on a CPU whose memory stands for the device's.

python -m bench syncs        a line for each optimizer; exits 1 if anything waits

Each is the sixth step of a small model on rank 0 of 4 simulated ranks: 8-bit states in torch ops instead of Triton
kernels, roots and bases next to the step (`overlap=True`). A line with `overlap=False` shows what they cost within it.
"""

import warnings
from typing import Any

from ..common import store

STEPS = 6
LIMIT = 1.0  # of the gradients' norm


def cases() -> dict[str, tuple[str, dict[str, Any], bool]]:
    """What is printed: the optimizer's name in `block_optim`, its options, and whether it may wait."""
    small = {"max_preconditioner_dim": 8, "precondition_frequency": 2}
    return {
        "AdamW": ("AdamW", {}, False),
        "AdamW, fused": ("AdamW", {"fused": True}, False),
        "AdamW8bit": ("AdamW8bit", {"min_8bit_numel": 1}, False),
        "Muon": ("Muon", {}, False),
        "Muon, Gram": ("Muon", {"method": "gram"}, False),
        "Shampoo": ("Shampoo", {**small, "overlap": True}, False),
        "SOAP": ("SOAP", {**small, "overlap": True}, False),
        "Shampoo, overlap=False": ("Shampoo", small, True),
        "SOAP, overlap=False": ("SOAP", small, True),
    }


def waits_of(name: str, options: dict[str, Any], *, known_norm: bool) -> dict[str, list[str]]:
    """Where the host waits in forward and backward, in clipping, and in the optimizer's step."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    import block_optim
    from block_optim.core import device as devices
    from fsdp_runtime import fully_shard
    from ragged_shard.testing import OnItsWay, host_waits, simulated_ranks

    kind = getattr(block_optim, name)
    with simulated_ranks(4), devices.stand_in(OnItsWay), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned a view")  # F.linear does, under a mode
        torch.manual_seed(0)
        sizes = [(16, 64), (64, 16), (16, 64)]  # of shapes for which the Gram form saves FLOPs
        model: Any = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
        mesh, policy = init_device_mesh("cpu", (4,)), None
        if name != "AdamW":
            policy = kind.block_policy(**{k: v for k, v in options.items() if k != "overlap"})
        for layer in model:
            fully_shard(layer, mesh=mesh, block_policy=policy)
        fully_shard(model, mesh=mesh)
        optimizer = kind(model.named_parameters(), lr=0.01, **options)
        found: dict[str, list[str]] = {}
        for _ in range(STEPS):
            batch = torch.randn(8, 16)
            states = (v for state in optimizer.state.values() for k, v in state.items() if k != "step")
            with host_waits([*model.parameters(), *states, batch]) as waits:
                model(batch).square().mean().backward()
                found["forward and backward"] = list(waits.found)
                norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
                found["clip_grad_norm_"] = waits.found[len(found["forward and backward"]) :]
                before = len(waits.found)
                optimizer.step(grad_norm=norm if known_norm else None)
                found["step"] = waits.found[before:]
            optimizer.zero_grad()
        optimizer.synchronize()
    return found


def main(arguments: list[str]) -> int:
    """Print the table."""
    store.parser_of("syncs", __doc__).parse_args(arguments)
    rows, failed = [], []
    for label, (name, options, may_wait) in cases().items():
        counts = []
        for known in (False, True):
            found = waits_of(name, options, known_norm=known)
            counts.append(str(len(found["step"])))
            failed += [
                line for part, lines in found.items() if part != "step" or not may_wait for line in lines
            ]
        rows.append(
            [label, *counts, *(str(len(found[part])) for part in ("clip_grad_norm_", "forward and backward"))]
        )
    print(
        store.table(
            ["optimizer", "step()", "step(grad_norm=)", "clip_grad_norm_", "forward and backward"], rows
        )
    )
    print("\n".join(failed) if failed else "No wait but those of roots and bases within the step.")
    return 1 if failed else 0

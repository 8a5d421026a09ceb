"""block-optim: a step on plain tensors of one process, compared with torch.optim.Muon and torchao's AdamW8bit.

python -m bench one_device        prints a table and writes bench/results/one_device.json; torchao's row needs torchao

No process group exists. Each pair steps by turns in one process on the same shapes, those of a small Llama: Muon on the
14 matrices of two layers (0.1M parameters; bf16 products are slow on a CPU without bf16 units), 8-bit AdamW on 18
tensors of two layers and the embedding (1.8M parameters). Thread CPU time of `step()`, one thread; the ratio is taken
within a turn. "Checked" has the check for non-finite gradients, which the others lack; without it the work is the same.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from . import machine, store

WIDTHS = {"Muon": (64, 172), "AdamW8bit": (256, 688)}


def shapes(dim: int, inner: int) -> list[tuple[int, ...]]:
    """The matrices of two layers."""
    square: tuple[int, ...] = (dim, dim)
    layer = [square] * 4 + [(inner, dim)] * 2 + [(dim, inner)]
    return layer * 2


def parameters(kind: str) -> list[Any]:
    """The tensors that an optimizer is measured on, with gradients."""
    import torch

    dim, inner = WIDTHS[kind]
    generator = torch.Generator().manual_seed(0)
    all_shapes = shapes(dim, inner) + ([] if kind == "Muon" else [(512, dim)] + [(dim,)] * 3)
    params = []
    for shape in all_shapes:
        param = torch.nn.Parameter(torch.randn(shape, generator=generator))
        param.grad = torch.randn(shape, generator=generator)
        params.append(param)
    return params


def pairs() -> dict[str, dict[str, Callable[[], Any]]]:
    """`{kind: {system: step}}`; the peer is first. torchao's is left out where it is not installed."""
    import torch

    from block_optim import AdamW8bit, Muon

    muons = {
        "torch.optim.Muon": torch.optim.Muon(parameters("Muon"), lr=1e-3),
        "ours": Muon(parameters("Muon"), lr=1e-3, skip_nonfinite=False),
        "ours, checked": Muon(parameters("Muon"), lr=1e-3),
    }
    result: dict[str, dict[str, Any]] = {"Muon": muons}
    try:
        from torchao.optim import AdamW8bit as TorchAO
    except ImportError as error:
        print(f"torchao left out: {error}")
        return {kind: {name: o.step for name, o in systems.items()} for kind, systems in result.items()}
    result["AdamW8bit"] = {
        "torchao's": TorchAO(parameters("AdamW8bit"), lr=1e-3, block_size=256),
        "ours": AdamW8bit(parameters("AdamW8bit"), lr=1e-3, skip_nonfinite=False),
        "ours, checked": AdamW8bit(parameters("AdamW8bit"), lr=1e-3),
    }
    return {kind: {name: o.step for name, o in systems.items()} for kind, systems in result.items()}


def measure(rounds: int) -> list[list[str]]:
    """Rows of the table: medians in milliseconds, ratio to the peer and the ratio's quartiles."""
    import torch

    torch.set_num_threads(1)
    rows = []
    for kind, systems in pairs().items():
        times: dict[str, list[float]] = {name: [] for name in systems}
        order, shuffle = list(systems), random.Random(0).shuffle
        for turn in range(rounds + 3):
            shuffle(order)
            for name in order:
                start = time.thread_time()
                systems[name]()
                if turn >= 3:
                    times[name].append(1e3 * (time.thread_time() - start))
        peer = times[next(iter(systems))]
        for name, taken in times.items():
            ratios = [own / other for own, other in zip(taken, peer, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            median = statistics.median(taken)
            rows.append([kind, name, f"{median:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    return rows


def main(arguments: list[str]) -> int:
    """Print the table and save it; the file says if the machine was too busy."""
    parser = store.parser_of("one_device", __doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args(arguments).rounds
    busy, calibration = machine.busy_share(), [machine.calibrate() for _ in range(4)]
    table = {
        "title": "A step on plain tensors, one process",
        "text": "Thread CPU milliseconds, medians; the ratio to the first system is taken within a turn.",
        "header": ["optimizer", "system", "ms", "ratio", "quartiles"],
        "rows": measure(rounds),
    }
    store.print_tables([table])
    noise = machine.verdict(busy, calibration, [])
    print(f"written to {store.save('one_device', {'tables': [table]}, noise=noise)}")
    return 0

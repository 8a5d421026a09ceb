"""What clipping by the norm of all gradients costs the host: ours and torch's function, beside plain tensors and FSDP2.

python -m bench clip                    512 parameters of 1024 elements in 8 units, on rank 0 of 4
python -m bench clip --elements 16384

One process stands for rank 0 (torch's fake process group). Plain tensors are this rank's slices by themselves. Thread
CPU time, the least of all rounds, taken in turns.
"""

import time
from collections.abc import Callable
from typing import Any

from . import store
from .ranks import fake_ranks

PARAMS, UNITS, RANKS = 512, 8, 4
GOALS = {"torch's function": 1.3, "model.clip_grad_norm_": 0.3}


def measure(elements: int, rounds: int) -> dict[str, float]:
    """Microseconds of each way to clip."""
    import torch
    import torch.distributed.fsdp
    from torch import nn

    import fsdp_runtime

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            count = PARAMS // UNITS
            self.terms = nn.ParameterList([nn.Parameter(torch.ones(elements)) for _ in range(count)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for term in self.terms:
                x = x + term
            return x

    with fake_ranks(RANKS) as mesh:

        def trained(fully_shard: Callable[..., Any]) -> Any:
            model: Any = nn.Sequential(*(Sum() for _ in range(UNITS)))
            for module in (*model, model):
                fully_shard(module, mesh=mesh)
            model(torch.ones(2, elements)).sum().backward()
            return model

        model = trained(fsdp_runtime.fully_shard)
        params = list(model.parameters())
        fsdp2 = list(trained(torch.distributed.fsdp.fully_shard).parameters())
        plain = [nn.Parameter(param.to_local().detach().clone()) for param in params]
        for one, param in zip(plain, params, strict=True):
            one.grad = param.grad.to_local().clone()
        ways: dict[str, Callable[[], Any]] = {
            "plain tensors": lambda: nn.utils.clip_grad_norm_(plain, 1e9),
            "torch's function": lambda: nn.utils.clip_grad_norm_(params, 1e9),
            "torch's function, FSDP2": lambda: nn.utils.clip_grad_norm_(fsdp2, 1e9),
            "fsdp_runtime.clip_grad_norm_": lambda: fsdp_runtime.clip_grad_norm_(params, 1e9),
            "model.clip_grad_norm_": lambda: model.clip_grad_norm_(1e9),
        }
        least: dict[str, float] = {}
        for _ in range(rounds):
            for name, way in ways.items():
                began = time.thread_time()
                way()
                took = 1e6 * (time.thread_time() - began)
                least[name] = min(least.get(name, took), took)
    return least


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = store.parser_of("clip", __doc__)
    parser.add_argument("--elements", type=int, default=1024, help="of each parameter")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)
    times = measure(options.elements, options.rounds)
    plain = times["plain tensors"]
    rows = [[name, f"{took:.0f}", f"{took / plain:.2f}", GOALS.get(name, "")] for name, took in times.items()]
    print(store.table([f"{PARAMS} parameters", "us", "of plain tensors'", "goal, at most"], rows))
    return 0

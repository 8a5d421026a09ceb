"""ragged-shard: what an optimizer step and gradient clipping cost the host, next to torch's own DTensor with Shard(0).

python -m bench placement        the same figures as a table: medians, all systems alternating in one process

The 75 tensors of a Llama-style model of 31.6M parameters, this process standing for rank 1 of 64 (torch's fake process
group: collectives return at once), so that what is left is mostly the host's work for each op: finding the rule, taking
local tensors out and wrapping results. ``plain`` steps the same local tensors with no DTensor around them: the floor.

    AdamW foreach, AdamW fused, AdamW for-loop      one optimizer.step()
    clip_grad_norm_                                 with max_norm=1

Time is thread CPU time, milliseconds, one thread.
"""

import statistics
import time
from typing import Any

from . import store
from .ranks import fake_ranks
from .recorded import recorded_as
from .workloads import WORKLOADS

SYSTEMS = ("ragged", "dtensor", "plain")
CASES = ("adamw_foreach", "adamw_fused", "adamw_forloop", "clip_grad_norm")
WORLD_SIZE, RANK = 64, 1
DIM = 512


def parameters(system, mesh):
    """This rank's parameters with gradients, as one system has them; the same number of local elements in each."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from ragged_shard import RaggedDTensor, RaggedShard

    torch.manual_seed(0)

    def make(shape):
        rows = shape[0] // WORLD_SIZE + (shape[0] % WORLD_SIZE > 0)
        local = torch.randn(rows, *shape[1:])
        stride = (shape[1], 1) if len(shape) == 2 else (1,)
        whole = (torch.Size([rows * WORLD_SIZE, *shape[1:]]), stride)
        if system == "ragged":
            placements = [RaggedShard((0,), (1,) * WORLD_SIZE)]
            return RaggedDTensor.from_local(local, mesh, placements, shape=whole[0], stride=whole[1])
        if system == "dtensor":
            return DTensor.from_local(local, mesh, [Shard(0)], shape=whole[0], stride=whole[1])
        return local

    tensors = []
    for whole in WORKLOADS["counts"].model("meta").parameters():
        param = torch.nn.Parameter(make(whole.shape))
        param.grad = make(whole.shape)
        tensors.append(param)
    return tensors


def work(case, params):
    """One call of what is measured."""
    import torch

    if case == "clip_grad_norm":
        return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)
    kind = case.removeprefix("adamw_")
    optimizer: Any = torch.optim.AdamW
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "forloop": {"foreach": False}}[kind]
    return optimizer(params, lr=1e-4, **options).step


def timed(call):
    """Thread CPU milliseconds of one call."""
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e3


@recorded_as("placement", track_host="ms")
class HostCost:
    """Thread CPU milliseconds of one call over the 75 tensors."""

    params = (CASES, SYSTEMS)
    param_names = ("case", "system")
    timeout = 120

    def setup(self, case, system):
        self.world = fake_ranks(WORLD_SIZE, rank=RANK)
        self.call = work(case, parameters(system, self.world.__enter__()))
        for _ in range(3):
            self.call()

    def teardown(self, case, system):
        self.world.__exit__(None, None, None)

    def track_host(self, case, system):
        return statistics.median(timed(self.call) for _ in range(20))


@recorded_as("placement", track_ratio="ratio")
class HostRatio:
    """Cost over torch's DTensor, both alternating in one process: below 1 is cheaper than DTensor."""

    params = (CASES,)
    param_names = ("case",)
    timeout = 120

    def track_ratio(self, case):
        medians = compare(case, ["ragged", "dtensor"], rounds=20)
        return medians["ragged"] / medians["dtensor"]


def compare(case, systems, rounds):
    """Median of each system, taking turns."""
    times: dict[str, list[float]] = {system: [] for system in systems}
    with fake_ranks(WORLD_SIZE, rank=RANK) as mesh:
        calls = {system: work(case, parameters(system, mesh)) for system in systems}
        for turn in range(rounds + 3):
            for system, call in calls.items():
                spent = timed(call)
                if turn >= 3:
                    times[system].append(spent)
    return {system: statistics.median(values) for system, values in times.items()}


def construction():
    """Microseconds to wrap a local tensor of a known layout, ours and torch's."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from ragged_shard import RaggedDTensor, RaggedShard

    local, shape, stride = torch.zeros(8, DIM), torch.Size([8 * WORLD_SIZE, DIM]), (DIM, 1)
    ours = [RaggedShard((0,), (1,) * WORLD_SIZE)]
    results = {}
    with fake_ranks(WORLD_SIZE, rank=RANK) as mesh:
        calls = {
            "ragged": lambda: RaggedDTensor.from_local(local, mesh, ours, shape=shape, stride=stride),
            "dtensor": lambda: DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride),
        }
        for name, call in calls.items():
            runs = [timed(lambda call=call: [call() for _ in range(200)]) for _ in range(10)]
            results[name] = statistics.median(runs) / 200 * 1e3
    return results


@recorded_as("placement", track_from_local="us")
class Construction:
    """Microseconds of one from_local with a layout that is cached."""

    params = (("ragged", "dtensor"),)
    param_names = ("system",)

    def track_from_local(self, system):
        return construction()[system]


def main(arguments):
    """Print the table."""
    store.parser_of("placement", __doc__).parse_args(arguments)
    rows = []
    for case in CASES:
        results = compare(case, SYSTEMS, rounds=40)
        rows.append(
            [case, *(f"{results[s]:.2f}" for s in SYSTEMS), f"{results['ragged'] / results['dtensor']:.2f}"]
        )
    results = construction()
    ratio = f"{results['ragged'] / results['dtensor']:.2f}"
    rows.append(["from_local, us", f"{results['ragged']:.2f}", f"{results['dtensor']:.2f}", "", ratio])
    print(store.table(["", "ragged ms", "DTensor ms", "plain ms", "ragged / DTensor"], rows))
    return 0

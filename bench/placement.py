"""ragged-shard: what an optimizer step and gradient clipping cost the host, beside torch's own DTensor with Shard(0).

python bench/placement.py        the same figures as a table: medians, all systems alternating in one process

The 75 tensors of a Llama-style model of 31.6M parameters, this process standing for rank 1 of 64 (torch's fake process
group: collectives return at once), so that what is left is mostly the host's work for each op: finding the rule, taking
local tensors out and wrapping results. ``plain`` steps the same local tensors with no DTensor around them: the floor.

    AdamW foreach, AdamW fused, AdamW for-loop      one optimizer.step()
    clip_grad_norm_                                 with max_norm=1

Time is thread CPU time, milliseconds, one thread.
"""

import os
import statistics
import time

SYSTEMS = ("ragged", "dtensor", "plain")
CASES = ("adamw_foreach", "adamw_fused", "adamw_forloop", "clip_grad_norm")
WORLD_SIZE, RANK = 64, 1
DIM, FFN, VOCAB, LAYERS = 512, 1376, 6144, 8


def shapes():
    """8 layers of 9 tensors, embedding, norm and head: 75 tensors, 31.6M elements."""
    layer = [(DIM, DIM)] * 4 + [(FFN, DIM)] * 2 + [(DIM, FFN)] + [(DIM,)] * 2
    return [(VOCAB, DIM)] + layer * LAYERS + [(DIM,), (VOCAB, DIM)]


def start():
    """Stand for one rank of many; a group that is there already is used."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD_SIZE)
    return init_device_mesh("cpu", (WORLD_SIZE,))


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

    found = []
    for shape in shapes():
        param = torch.nn.Parameter(make(shape))
        param.grad = make(shape)
        found.append(param)
    return found


def work(case, params):
    """One call of what is measured."""
    import torch

    if case == "clip_grad_norm":
        return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)
    kind = case.removeprefix("adamw_")
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "forloop": {"foreach": False}}[kind]
    return torch.optim.AdamW(params, lr=1e-4, **options).step


def timed(call):
    """Thread CPU milliseconds of one call."""
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e3


class HostCost:
    """Thread CPU milliseconds of one call over the 75 tensors."""

    params = (CASES, SYSTEMS)
    param_names = ("case", "system")
    timeout = 120

    def setup(self, case, system):
        self.call = work(case, parameters(system, start()))
        for _ in range(3):
            self.call()

    def track_host(self, case, system):
        return statistics.median(timed(self.call) for _ in range(20))

    track_host.unit = "ms"


class HostRatio:
    """Cost over torch's DTensor, both alternating in one process: below 1 is cheaper than DTensor."""

    params = (CASES,)
    param_names = ("case",)
    timeout = 120

    def track_ratio(self, case):
        medians = compare(case, ["ragged", "dtensor"], rounds=20)
        return medians["ragged"] / medians["dtensor"]

    track_ratio.unit = "ratio"


def compare(case, systems, rounds):
    """Median of each system, taking turns."""
    mesh = start()
    calls = {system: work(case, parameters(system, mesh)) for system in systems}
    times = {system: [] for system in systems}
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

    mesh = start()
    local, shape, stride = torch.zeros(8, DIM), torch.Size([8 * WORLD_SIZE, DIM]), (DIM, 1)
    ours = [RaggedShard((0,), (1,) * WORLD_SIZE)]
    calls = {
        "ragged": lambda: RaggedDTensor.from_local(local, mesh, ours, shape=shape, stride=stride),
        "dtensor": lambda: DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride),
    }
    found = {}
    for name, call in calls.items():
        runs = [timed(lambda call=call: [call() for _ in range(200)]) for _ in range(10)]
        found[name] = statistics.median(runs) / 200 * 1e3
    return found


class Construction:
    """Microseconds of one from_local with a layout that is cached."""

    params = (("ragged", "dtensor"),)
    param_names = ("system",)

    def track_from_local(self, system):
        return construction()[system]

    track_from_local.unit = "us"


def main():
    print(f"{'':16}{'ragged ms':>11}{'DTensor ms':>12}{'plain ms':>10}{'ragged / DTensor':>19}")
    for case in CASES:
        found = compare(case, SYSTEMS, rounds=40)
        ratio = found["ragged"] / found["dtensor"]
        print(f"{case:16}{found['ragged']:11.2f}{found['dtensor']:12.2f}{found['plain']:10.2f}{ratio:19.2f}")
    found = construction()
    ratio = found["ragged"] / found["dtensor"]
    print(f"{'from_local, us':16}{found['ragged']:11.2f}{found['dtensor']:12.2f}{'':10}{ratio:19.2f}")


if __name__ == "__main__":
    main()

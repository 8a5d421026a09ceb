"""Single packages: layout-planner, ragged-shard and dbuffer without the runtime.

python -m bench planner      time to plan all layers of real models on 1024 ranks, and their padding
python -m bench placement    host time of an optimizer step and of clipping on ragged tensors and on torch's DTensor
python -m bench buffer       host time of moving a group without the collective, ours and FSDP2's
python -m bench exchange     large gathers and reductions by each transport, on 2 to 16 ranks

Times are thread CPU time of one thread, medians, all systems alternating in one process that stands for one rank of
torch's fake process group; `exchange` has real ranks. Models are Llama-style, 31.6M parameters in 9 groups, 75 tensors.
"""

import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from .measure import fake_ranks, interleave, launch, medians_ms, options_of, table
from .models import WORKLOADS, groups_of

# -- layout-planner ----------------------------------------------------------------------------------------------------

MODELS = ["deepseek-v3", "deepseek-v3 separate", "gpt-oss-120b", "llama-3-70b"]
BLOCKS = ["rows:1", "rows:16", "rows:32", "rows:128"]
PLANNED_RANKS = 1024


def plan_model(name: str, block: str) -> list[tuple[int, Any]]:
    """Layouts of the model's groups, groups of the same shape once, and how often each occurs."""
    from layout_planner import load_model, parse_block, plan, separate_experts

    base, _, experts = name.partition(" ")
    model = separate_experts(load_model(base)) if experts else load_model(base)
    chosen = parse_block(block)
    return [(group.count, plan(group.specs(chosen), PLANNED_RANKS)) for group in model.groups]


def padding_percent(layouts: list[tuple[int, Any]]) -> float:
    """Padding of all groups, in per cent of the model."""
    padding = sum(count * layout.padding for count, layout in layouts)
    return 100 * padding / sum(count * layout.numel for count, layout in layouts)


def main_planner(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table."""
    parser.parse_args(arguments)
    rows = []
    for name in MODELS:
        for block in BLOCKS:
            times = interleave({"it": partial(plan_model, name, block)}, 5, warm_up=0)
            padding = padding_percent(plan_model(name, block))
            rows.append([name, block, f"{medians_ms(times)['it']:.0f} ms", f"{padding:.2f} %"])
    print(table(["model", "block", f"plan all layers, {PLANNED_RANKS} ranks", "padding"], rows))
    return 0


# -- ragged-shard ------------------------------------------------------------------------------------------------------

PLACED = ("ragged", "dtensor", "plain")
CASES = ("adamw_foreach", "adamw_fused", "adamw_forloop", "clip_grad_norm")
WORLD_SIZE, RANK, DIM = 64, 1, 512


def parameters(system: str, mesh: Any) -> list[Any]:
    """This rank's parameters with gradients, in one system's form; the same number of local elements in each."""
    from ragged_shard import RaggedDTensor, RaggedShard

    torch.manual_seed(0)

    def make(shape: Any) -> Any:
        rows = shape[0] // WORLD_SIZE + (shape[0] % WORLD_SIZE > 0)
        local = torch.randn(rows, *shape[1:])
        whole: dict[str, Any] = {"shape": torch.Size([rows * WORLD_SIZE, *shape[1:]])}
        whole["stride"] = (shape[1], 1) if len(shape) == 2 else (1,)
        if system == "ragged":
            return RaggedDTensor.from_local(local, mesh, [RaggedShard((0,), (1,) * WORLD_SIZE)], **whole)
        return DTensor.from_local(local, mesh, [Shard(0)], **whole) if system == "dtensor" else local

    tensors = []
    for whole in WORKLOADS["counts"].model("meta").parameters():
        param = torch.nn.Parameter(make(whole.shape))
        param.grad = make(whole.shape)
        tensors.append(param)
    return tensors


def compare_placements(case: str, systems: tuple[str, ...], rounds: int) -> dict[str, float]:
    """Median milliseconds of each system in one of the cases."""
    options: dict[str, Any] = {
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "forloop": {"foreach": False},
    }
    calls: dict[str, Callable[[], Any]] = {}
    with fake_ranks(WORLD_SIZE, rank=RANK) as mesh:
        for system in systems:
            params = parameters(system, mesh)
            if case == "clip_grad_norm":
                calls[system] = partial(torch.nn.utils.clip_grad_norm_, params, 1.0)
            else:
                kind = options[case.removeprefix("adamw_")]
                calls[system] = torch.optim.AdamW(params, lr=1e-4, **kind).step
        return medians_ms(interleave(calls, rounds))


def construction() -> dict[str, float]:
    """Microseconds of one `from_local` with a layout that is cached, ours and torch's."""
    from ragged_shard import RaggedDTensor, RaggedShard

    whole: dict[str, Any] = {"shape": torch.Size([8 * WORLD_SIZE, DIM]), "stride": (DIM, 1)}
    local, ours = torch.zeros(8, DIM), [RaggedShard((0,), (1,) * WORLD_SIZE)]
    with fake_ranks(WORLD_SIZE, rank=RANK) as mesh:
        calls: dict[str, Callable[[], Any]] = {
            "ragged": lambda: [RaggedDTensor.from_local(local, mesh, ours, **whole) for _ in range(200)],
            "dtensor": lambda: [DTensor.from_local(local, mesh, [Shard(0)], **whole) for _ in range(200)],
        }
        return {name: 1e3 * ms / 200 for name, ms in medians_ms(interleave(calls, 10)).items()}


def main_placement(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table."""
    parser.parse_args(arguments)
    rows = []
    for case in CASES:
        ms = compare_placements(case, PLACED, rounds=40)
        rows.append([case, *(f"{ms[s]:.2f}" for s in PLACED), f"{ms['ragged'] / ms['dtensor']:.2f}"])
    us = construction()
    cells = (f"{us['ragged']:.2f}", f"{us['dtensor']:.2f}", "", f"{us['ragged'] / us['dtensor']:.2f}")
    print(
        table(
            ["", "ragged ms", "DTensor ms", "plain ms", "ragged / DTensor"],
            [*rows, ["from_local, us", *cells]],
        )
    )
    return 0


# -- dbuffer -----------------------------------------------------------------------------------------------------------

WORLD_SIZES = [8, 64, 1024]
DTYPES = ["float32", "bfloat16"]
PHASES = (
    "gather",
    "reduce",
    "write",
)  # FSDP2's reduce also writes the gradients; `write` is their way in ours
RANKS = (2, 3, 4, 8, 16)
TRANSPORTS = ("collectives", "peer_memory")
WARM_UP, REPEATS = 3, 4  # repeats of one move between barriers, which take time themselves


class Nothing:
    """A `dbuffer.Transport` and work in one: everything has completed at once, and nothing is moved."""

    name = "nothing"

    def all_gather(self, pairs: Any, label: str) -> "Nothing":
        return self

    def reduce_scatter(self, pairs: Any, op: Any, label: str) -> "Nothing":
        return self

    def all_to_all(self, receive: Any, send: Any, label: str) -> "Nothing":
        return self

    def all_reduce(self, tensors: Any, op: Any, label: str) -> "Nothing":
        return self

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Ours:
    """Every group as one buffer of parameters and one of gradients; each phase over all groups."""

    def __init__(self, model: Any, mesh: Any, dtype: str) -> None:
        from dbuffer import DBuffer, Gather, Recycler, ReduceScatter
        from layout_planner import TensorSpec, plan

        compute = getattr(torch, dtype)
        options: dict[str, Any] = {
            "dtype": torch.float32, "full_dtype": compute, "recycler": Recycler("cpu"), "check_ranks": False,
            "transport": lambda group: Nothing(),
        }  # fmt: skip
        self.groups = []
        for tensors in groups_of(model):
            layout = plan([TensorSpec(name, tuple(p.shape)) for name, p in tensors.items()], mesh.size())
            params, grads = (DBuffer(layout, mesh, **options) for _ in range(2))
            for name, view in params.local_views.items():
                view.copy_(params.geometry.cut(name, tensors[name].detach()))
            values = {name: torch.ones(p.shape, dtype=compute) for name, p in tensors.items()}
            moves = Gather([params]), ReduceScatter([grads], op="avg")
            self.groups.append((params, grads, values, *moves))

    def gather(self) -> None:
        for params, _, _, all_gather, _ in self.groups:
            all_gather.start().wait()
            params.release()

    def reduce(self) -> None:
        for _, grads, _, _, reduce_scatter in self.groups:
            grads.materialize()
            reduce_scatter.start().wait()
            grads.release()

    def before_write(self) -> None:
        for _, grads, *_ in self.groups:
            grads.materialize()

    def write(self) -> None:
        for _, grads, values, *_ in self.groups:
            views = grads.views
            for name, value in values.items():
                views[name].copy_(value)


class FSDP2:
    """The same groups by torch's `fully_shard`, its collectives replaced through its own hooks."""

    def __init__(self, model: Any, mesh: Any, dtype: str) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        def nothing_of(name: str) -> Any:
            base = getattr(_fsdp_collectives, name)
            return type("Nothing", (base,), {"__call__": lambda *args, **kwargs: None})()

        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=getattr(torch, dtype))
        self.modules = [*model.blocks, model]
        for module in self.modules:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        model(torch.zeros(1, 2, dtype=torch.long))  # sets the whole tree up
        model.reshard()
        for module in self.modules:
            module.set_custom_all_gather(nothing_of("DefaultAllGather"))
            module.set_custom_reduce_scatter(nothing_of("DefaultReduceScatter"))
        self.groups = [
            group for module in self.modules for group in module._get_fsdp_state()._fsdp_param_groups
        ]

    def before_gather(self) -> None:
        for module in self.modules:
            module.reshard()

    def gather(self) -> None:
        for module in self.modules:
            module.unshard()
            module.reshard()

    def before_reduce(self) -> None:
        for module, group in zip(self.modules, self.groups, strict=True):
            module.unshard()
            for parameter in group.fsdp_params:
                unsharded = parameter.unsharded_param
                unsharded.grad = torch.ones_like(unsharded)
                parameter.sharded_param.grad = None
            group.comm_ctx.reduce_scatter_states.clear()

    def reduce(self) -> None:
        for group in self.groups:
            group.post_backward()


def measure_buffer(world_size: int, dtype: str, rounds: int) -> dict[tuple[str, str], float]:
    """`{(system, phase): ms}`, medians over rounds of the mean over groups."""
    with fake_ranks(world_size) as mesh:
        build = WORKLOADS["counts"].model
        systems: dict[str, Any] = {
            "dbuffer": Ours(build(), mesh, dtype),
            "FSDP2": FSDP2(build(), mesh, dtype),
        }
        calls, before = (
            {
                (name, phase): getattr(system, prefix + phase)
                for name, system in systems.items()
                for phase in PHASES
                if hasattr(system, prefix + phase)
            }
            for prefix in ("", "before_")
        )
        times = medians_ms(interleave(calls, rounds, before=before))
    return {key: ms / len(systems["dbuffer"].groups) for key, ms in times.items()}


def main_buffer(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table."""
    rounds, rows = options_of(parser, arguments, rounds=15).rounds, []
    for world_size in WORLD_SIZES:
        for dtype in DTYPES:
            times = measure_buffer(world_size, dtype, rounds)
            for name in ("dbuffer", "FSDP2"):
                cells = [times.get((name, phase), 0.0) for phase in PHASES]
                rows.append([world_size, dtype, name, *(f"{value:.3f}" for value in (*cells, sum(cells)))])
    print(table(["ranks", "dtype", "", *(f"{phase} ms" for phase in PHASES), "all"], rows))
    return 0


def exchange(request: dict[str, Any]) -> dict[str, dict[str, tuple[float, float] | None]]:
    """On a rank: `{kind: {transport: (wall, CPU) milliseconds}}`; None if this machine does not allow it."""
    from dbuffer import DBuffer, Gather, ReduceScatter
    from layout_planner import TensorSpec, plan

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    layout = plan([TensorSpec("full", (request["nbytes"] // 4 // ranks * ranks,))], ranks)
    moves: dict[tuple[str, str], Any] = {}
    for name in TRANSPORTS:
        buffer = DBuffer(layout, mesh, dtype=torch.float32, transport=name)
        buffer.materialize()
        for flat in (*buffer.shard, *buffer.full):
            flat.normal_()
        moves["gather", name] = Gather([buffer]).start
        moves["reduce", name] = ReduceScatter([buffer], op="sum").start
    walls: dict[tuple[str, str], list[float]] = {key: [] for key in moves}
    cpus: dict[tuple[str, str], list[float]] = {key: [] for key in moves}
    missing: set[str] = set()
    for turn in range(request["rounds"] + WARM_UP):
        for key in sorted(moves, reverse=bool(turn % 2)):
            if key[1] in missing:
                continue
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            try:
                for _ in range(REPEATS):
                    moves[key]().wait()
            except ValueError as error:  # the same on all ranks
                print(error, flush=True)
                missing.add(key[1])
            walls[key].append(1e3 * (time.perf_counter() - began) / REPEATS)
            dist.barrier()  # peers may be busy with this rank's memory
            cpus[key].append(1e3 * (time.process_time() - cpu) / REPEATS)

    def medians(key: tuple[str, str]) -> tuple[float, float]:
        of_all = torch.tensor(cpus[key], dtype=torch.float64)
        dist.all_reduce(of_all)
        return statistics.median(walls[key][WARM_UP:]), float(of_all[WARM_UP:].quantile(0.5))

    return {
        kind: {name: None if name in missing else medians((kind, name)) for name in TRANSPORTS}
        for kind in ("gather", "reduce")
    }


def main_exchange(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table: wall of rank 0, CPU of all ranks together."""
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="separated by commas")
    parser.add_argument("--mib", default="12", help="gathered; several are separated by commas")
    options = options_of(parser, arguments, rounds=27)
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        for size in map(float, options.mib.split(",")):
            results = launch(exchange, ranks, {"rounds": options.rounds, "nbytes": int(size * 2**20)})
            for kind, times in results.items():
                cells = ["-" if both is None else f"{both[i]:.2f}" for i in (0, 1) for both in times.values()]
                rows.append([ranks, f"{size:g}", kind, *cells])
    header = [f"{clock}: {name}, ms" for clock in ("wall", "CPU") for name in TRANSPORTS]
    print(table(["ranks", "MiB", "", *header], rows))
    return 0

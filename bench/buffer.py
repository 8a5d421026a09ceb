"""dbuffer: CPU time that moving a group costs without the collective itself, next to FSDP2's, for the same groups.

python -m bench buffer        the same figures as a table: medians, both systems alternating in one process

A Llama-style model of 31.6M parameters: 9 groups, 75 tensors. One process stands for rank 0 of 8, 64 or 1024
(torch's fake process group); collectives are replaced by nothing on both sides, so what is left is what a
runtime adds to them:

    gather    dbuffer: all_gather, wait, release            FSDP2: unshard (copy-in, copy-out), reshard
    reduce    dbuffer: materialize, reduce_scatter, wait,   FSDP2: post_backward (copy-in, cast back) of gradients
              release of a full gradient buffer             that are there; its reshard counts here too
    write     dbuffer: gradients copied into the views, which a runtime does unless a kernel wrote them there

"copies" is the part spent in ops that copy or cast. Time is thread CPU time, milliseconds for each group, one thread.
"""

import statistics
import time
from typing import Any

from . import store
from .ranks import fake_ranks
from .recorded import recorded_as
from .workloads import WORKLOADS

WORLD_SIZES = [8, 64, 1024]
DTYPES = ["float32", "bfloat16"]


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


class CopySpy:
    """Thread CPU seconds spent in ops that copy or cast, while entered."""

    def __init__(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        spy = self
        self.seconds = 0.0

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                name = func._schema.name
                start = time.thread_time()
                result = func(*args, **(kwargs or {}))
                if "copy" in name or "cat" in name:
                    spy.seconds += time.thread_time() - start
                return result

        self.mode = Mode()


class Ours:
    """Every group as one buffer of parameters and one of gradients."""

    def __init__(self, model, mesh, dtype):
        import torch

        from dbuffer import DBuffer, Recycler
        from layout_planner import TensorSpec, plan

        from .models import groups_of

        compute = getattr(torch, dtype)
        options = {
            "dtype": torch.float32, "full_dtype": compute, "recycler": Recycler("cpu"), "check_ranks": False,
            "transport": lambda group: Nothing(),
        }  # fmt: skip
        self.groups = []
        for tensors in groups_of(model):
            specs = [TensorSpec(name, tuple(p.shape)) for name, p in tensors.items()]
            layout = plan(specs, mesh.size())
            parameters, gradients = (DBuffer(layout, mesh, **options) for _ in range(2))
            for name, view in parameters.local_views.items():
                view.copy_(parameters.geometry.cut(name, tensors[name].detach()))
            values = {name: torch.ones(p.shape, dtype=compute) for name, p in tensors.items()}
            self.groups.append((parameters, gradients, values))

    def phases(self, group):
        """Calls to time, by name."""
        parameters, gradients, values = group
        from dbuffer import Gather, ReduceScatter

        all_gather, reduce_scatter = Gather([parameters]), ReduceScatter([gradients], op="avg")

        def gather():
            all_gather.start().wait()
            parameters.release()

        def write():
            views = gradients.views
            for name, value in values.items():
                views[name].copy_(value)

        def reduce():
            gradients.materialize()
            reduce_scatter.start().wait()
            gradients.release()

        return {
            "gather": (lambda: None, gather),
            "reduce": (lambda: None, reduce),
            "write": (gradients.materialize, write),
        }


class FSDP2:
    """The same groups by torch's fully_shard, its collectives replaced through its own hooks."""

    def __init__(self, model, mesh, dtype):
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        compute = getattr(torch, dtype)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute)
        modules = [*model.blocks, model]
        for module in modules:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        model(torch.zeros(1, 2, dtype=torch.long))  # sets the whole tree up
        model.reshard()
        for module in modules:
            module.set_custom_all_gather(nothing_of("DefaultAllGather"))
            module.set_custom_reduce_scatter(nothing_of("DefaultReduceScatter"))
        self.groups = modules

    def phases(self, module):
        """Calls to time, by name."""
        import torch

        (group,) = module._get_fsdp_state()._fsdp_param_groups

        def gather():
            module.unshard()
            module.reshard()

        def with_gradients():
            module.unshard()
            for parameter in group.fsdp_params:
                unsharded = parameter.unsharded_param
                unsharded.grad = torch.ones_like(unsharded)
                parameter.sharded_param.grad = None
            group.comm_ctx.reduce_scatter_states.clear()

        return {"gather": (module.reshard, gather), "reduce": (with_gradients, group.post_backward)}


def nothing_of(name):
    """FSDP2's own communication object, its collective left out."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    base = getattr(_fsdp_collectives, name)
    return type("Nothing", (base,), {"__call__": lambda *args, **kwargs: None})()


def measure(world_size, dtype, rounds):
    """`{(system, phase): (ms, ms of it in copies)}`, medians over rounds of the mean over groups."""
    with fake_ranks(world_size) as mesh:
        build = WORKLOADS["counts"].model
        systems = {"dbuffer": Ours(build(), mesh, dtype), "FSDP2": FSDP2(build(), mesh, dtype)}
        times: dict[tuple[str, str], list[float]] = {}
        copies: dict[tuple[str, str], list[float]] = {}
        for turn in range(rounds + 2):
            for name, system in systems.items():
                for key, seconds, copying in one_round(name, system):
                    if turn >= 2:  # the first two warm up
                        times.setdefault(key, []).append(seconds)
                        copies.setdefault(key, []).append(copying)
    return {key: (1e3 * statistics.median(times[key]), 1e3 * statistics.median(copies[key])) for key in times}


def one_round(name, system):
    """Each phase over all groups: `(key, seconds a group, seconds of copies a group)`."""
    phases = [system.phases(group) for group in system.groups]
    for phase in phases[0]:
        total, spy = 0.0, CopySpy()
        for calls in phases:
            prepare, call = calls[phase]
            prepare()
            start = time.thread_time()
            call()
            total += time.thread_time() - start
            prepare()
            with spy.mode:  # again, since looking on costs time
                call()
        yield (name, phase), total / len(phases), spy.seconds / len(phases)


@recorded_as("buffer", track_host_ms="ms", track_copy_ms="ms", track_share_of_fsdp2="ratio")
class Group:
    """Host time of a group without its collectives. To stay under 0.3 ms, with no copy in fp32."""

    params = (WORLD_SIZES, DTYPES)
    param_names = ("world_size", "dtype")
    timeout = 600

    def setup_cache(self):
        return {(w, d): measure(w, d, 7) for w in WORLD_SIZES for d in DTYPES}

    def track_host_ms(self, results, world_size, dtype):
        times = results[world_size, dtype]
        return sum(t - c for (name, phase), (t, c) in times.items() if name == "dbuffer" and phase != "write")

    def track_copy_ms(self, results, world_size, dtype):
        times = results[world_size, dtype]
        return sum(c for (name, phase), (_, c) in times.items() if name == "dbuffer" and phase != "write")

    def track_share_of_fsdp2(self, results, world_size, dtype):
        """All of ours, gradients' way into the buffer included, as a share of all of FSDP2's."""
        times = results[world_size, dtype]
        ours, theirs = (
            sum(t for (name, _), (t, _) in times.items() if name == n) for n in ("dbuffer", "FSDP2")
        )
        return ours / theirs


def main(arguments):
    """Print the table."""
    parser = store.parser_of("buffer", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args(arguments).rounds
    rows = []
    for world_size in WORLD_SIZES:
        for dtype in DTYPES:
            found = measure(world_size, dtype, rounds)
            for name in ("dbuffer", "FSDP2"):
                (gather, g_copies), (reduce, r_copies) = found[name, "gather"], found[name, "reduce"]
                write = found.get((name, "write"), (0.0, 0.0))[0]
                cells = (gather, g_copies, reduce, r_copies, write, gather + reduce + write)
                rows.append([world_size, dtype, name, *(f"{value:.3f}" for value in cells)])
    header = ["ranks", "dtype", "", "gather", "of it copies", "reduce", "of it copies", "write", "all"]
    print(store.table(header, rows))
    return 0

"""Loose parameters in a layout under an optimizer. Everything here also runs on ranks.

    plain                          not distributed
    replicas                       the same on every rank, which divide the work (`replicate_mesh`)
    elements, rows, whole          ragged, cut at random: anywhere, between rows, all on one rank; many are empty
    one rank                       ragged, everything on the last rank
    shard, replicate               DTensors of torch
    planned                        ragged as the planner cuts under the optimizer's block policy

On a mesh of two axes the first one replicates. What a rank holds lies in one buffer, with gaps: `Run.result` checks
those of the parameters, those of the gradients are NaN.
"""

import inspect
import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from block_optim import SOAP, AdamW, AdamW8bit, Mixed, Muon, Param, Shampoo, local_of
from block_optim.core.holding import Holding
from block_optim.core.pieces import run
from block_optim.routing.mixed import ALGORITHMS
from layout_planner import Elements, Rows, TensorSpec, Tile, plan
from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.testing import rank_mesh

cut_twice = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="torch < 2.13 makes no process group in the order of slices that two axes cut",
)

# For Muon: squares, tall, wide, prime, a single row, a single element; and stacks.
MATRICES = ((8, 8), (13, 7), (7, 13), (24, 40), (40, 24), (1, 5), (1, 1), (24, 40), (24, 40))
STACKS = ((3, 8, 6), (5, 4, 7), (6, 2, 3, 3))
SHAPES = ((8, 6), (6, 8), (12, 4))
BF16 = torch.bfloat16
GAP, GAP_FILL = 3, 7.25


class Mix:
    """Makes a `Mixed`: parameter i has the algorithm and the options ``choices[i % len(choices)]``, and more."""

    def __init__(self, *choices):
        self.choices = choices

    def groups(self, named, **options):
        parts = [(named[i :: len(self.choices)], *choice) for i, choice in enumerate(self.choices)]
        return [{"params": some, "algorithm": name, **own, **options} for some, name, own in parts if some]

    def __call__(self, named, lr=0.1, **options):
        return Mixed(self.groups(named, **options), lr=lr)

    def block_policy(self, **options):
        policies = [ALGORITHMS[name].block_policy(**own) for name, own in self.choices]
        return lambda name, param: policies[int(name[1:]) % len(policies)](name, param)


def small(**options):
    """Options of Shampoo and SOAP for small matrices."""
    return {"max_preconditioner_dim": 4, "precondition_frequency": 2, **options}


class SmallBuckets(Muon):
    """Muon whose transfers take several buckets."""

    bucket_bytes = 300


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "AdamW fused": (AdamW, {"fused": True}),
    "AdamW8bit": (AdamW8bit, {"min_8bit_numel": 1, "block": Elements(8)}),
    "AdamW8bit tiles": (AdamW8bit, {"min_8bit_numel": 10, "block": Tile(4, 8)}),
    "Muon": (Muon, {}),
    "Muon cautious": (Muon, {"ns_coefficients": "polar_express", "cautious_weight_decay": True}),
    "Muon buckets": (SmallBuckets, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    "NorMuon": (Muon, {"normuon": True}),
    "NorMuon buckets": (SmallBuckets, {"normuon": True, "ns_coefficients": "quintic"}),
    "Shampoo": (Shampoo, small(betas=(0.9, 0.95))),
    "Shampoo sums": (Shampoo, small(betas=(0.9, 1.0), grafting="rmsprop", diagonal_above=10)),
    "SOAP": (SOAP, small()),
    "SOAP diagonal": (SOAP, small(diagonal_above=10)),
    "Mixed": (Mix(("muon", {}), ("soap", small()), ("adamw", {})), {}),
    "Mixed 8-bit": (
        Mix(("shampoo", small()), ("adamw8bit", {"block": Elements(8), "min_8bit_numel": 1}), ("muon", {})),
        {},
    ),
}
NARROW: dict[str, dict[str, Any]] = {"stochastic rounding": {"dtype": BF16, "stochastic_rounding": True}}


def run_of(case, layout="plain", mesh_shape=(), **more):
    """A run of one of `KINDS`, or of one of them in one of the ways of `NARROW`: "AdamW, stochastic rounding"."""
    name, _, narrow = case.partition(", ")
    kind, options = KINDS[name]
    own = {"shapes": SHAPES, "lr": 0.1, **options, **NARROW.get(narrow, {})}
    return Run(kind, layout, mesh_shape, **{**own, **more})


CASES = ("AdamW", "AdamW fused", "AdamW8bit", "Muon", "NorMuon", "Shampoo", "SOAP", "Mixed")
# These share what these tests are about with AdamW, Muon and SOAP.
_LIKE_ANOTHER = ("AdamW fused", "NorMuon", "Shampoo")
every_kind = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case in _LIKE_ANOTHER)) for case in CASES]
)


def make(case, params, **more):
    """An optimizer of one of `KINDS`."""
    kind, options = KINDS[case]
    return kind(params, **{"lr": 0.1, **options, **more})


def tensors(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def held_runs(cuts):
    """A Holding without a mesh: rank r holds [cuts[r], cuts[r + 1]); this process is rank 0."""
    return Holding(None, (), (), 0, tuple(run(*ends) for ends in itertools.pairwise(cuts)))


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def world_mesh(*shape):
    shape = shape or (dist.get_world_size(),)
    return rank_mesh(
        *shape, names={1: ("shard",), 2: ("replicate", "shard")}.get(len(shape), ("a", "b", "c"))
    )


def random_units(rng, total, ranks):
    """Shares of ``total`` units, many of them empty."""
    cuts = sorted(rng.choice([0, total, rng.randint(0, total)]) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))


def put(tensor, mesh, placements):
    """A full tensor with these placements: a RaggedDTensor if one is ragged, else a DTensor of torch."""
    ragged = any(isinstance(p, RaggedShard) for p in placements)
    return (distribute_tensor if ragged else torch_distribute)(tensor, mesh, placements, src_data_rank=None)


def placed(tensor, mesh, layout, rng, units=None):
    """A full tensor in a layout. Communicates nothing: all ranks have the tensor."""
    if layout in ("plain", "replicas"):
        return tensor.clone()
    if callable(layout):
        return put(tensor, mesh, layout(mesh, tensor.ndim))
    others, ranks, dims = [Replicate()] * (mesh.ndim - 1), mesh.size(mesh.ndim - 1), tuple(range(tensor.ndim))
    if layout in ("shard", "replicate"):
        placement = Shard(0) if layout == "shard" and dims else Replicate()
        return torch_distribute(tensor, mesh, [*others, placement], src_data_rank=None)
    if layout == "rows" and dims:
        dims, units = (0,), random_units(rng, tensor.shape[0], ranks)
    elif layout == "elements" and dims:
        units = random_units(rng, tensor.numel(), ranks)
    elif layout != "planned":
        holder = ranks - 1 if layout == "one rank" else rng.randrange(ranks)
        dims, units = dims[:1], [int(rank == holder) for rank in range(ranks)]
    return distribute_tensor(tensor, mesh, [*others, RaggedShard(dims, units)], src_data_rank=None)


def neighbors(tensors, fill, gap=GAP):
    """The tensors, with this rank's elements of them in one buffer; and the buffer's gaps, which have ``fill``."""
    locals_ = [local_of(t) for t in tensors]
    buffer = torch.full((sum(t.numel() + gap for t in locals_),), fill, dtype=tensors[0].dtype)
    result, gaps, start = [], [], 0
    for tensor, local in zip(tensors, locals_, strict=True):
        stop = start + local.numel()
        result.append(Param(tensor, "").wrap(buffer[start:stop].view(local.shape).copy_(local)))
        gaps.append(buffer[stop : stop + gap])
        start = stop + gap
    return result, gaps


class Run:
    """A step takes the gradients of its number; the same on every world size and in every layout."""

    between = torch.nan  # in the gaps of gradients

    def __init__(
        self, kind, layout="plain", mesh_shape=(), *, shapes, seed=0, cuts=0, dtype=torch.float32,
        skip_nonfinite=True, **options,
    ):  # fmt: skip
        self.layout, self.shapes, self.seed, self.cuts, self.dtype = layout, shapes, seed, cuts, dtype
        self.mesh: Any = None if layout in ("plain", "replicas") else world_mesh(*mesh_shape)
        self.units = self._planned_units(kind, options) if layout == "planned" else [None] * len(shapes)
        self.module = torch.nn.Module()
        if layout == "replicas":
            options["replicate_mesh"] = world_mesh()
        weights, self.gaps = neighbors(self.put(tensors(shapes, seed, dtype)), GAP_FILL)
        for i, weight in enumerate(weights):
            self.module.register_parameter(f"p{i}", torch.nn.Parameter(weight))
        self.params = list(self.module.parameters())
        self.optimizer = kind(list(self.module.named_parameters()), **options)
        self.optimizer.skip_nonfinite = skip_nonfinite

    def _planned_units(self, kind, options):
        policy = kind.block_policy(**options)
        blocks = [policy(f"p{i}", torch.empty(shape)) or Rows(1) for i, shape in enumerate(self.shapes)]
        specs = [TensorSpec(f"p{i}", s, b) for i, (s, b) in enumerate(zip(self.shapes, blocks, strict=True))]
        ranks = range(self.mesh.size(self.mesh.ndim - 1))
        layout = plan(specs, len(ranks), align=1)
        ranges = [[layout.local_range(spec.name, rank) for rank in ranks] for spec in specs]
        return [[stop - start for start, stop in found] for found in ranges]

    def put(self, values):
        return [
            placed(value, self.mesh, self.layout, random.Random(f"{i} {self.cuts}"), units)
            for i, (value, units) in enumerate(zip(values, self.units, strict=True))
        ]

    def give(self, number, without=()):
        """Set gradients, but for the parameters in ``without``."""
        grads = self.put(tensors(self.shapes, 1000 + self.seed + 31 * number, self.dtype))
        grads, _ = neighbors(grads, self.between)
        for i, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            param.grad = None if i in without else grad

    def step(self, number, without=(), **step_options):
        self.give(number, without)
        self.optimizer.step(**step_options)

    def steps(self, first, last):
        """Some steps; returns the run."""
        for number in range(first, last):
            self.step(number)
        return self

    def result(self):
        """Parameters and states, in full."""
        assert all((gap == GAP_FILL).all() for gap in self.gaps)
        found = {name: full(p.detach()) for name, p in self.module.named_parameters()}
        for name, p in self.module.named_parameters():
            found |= {f"{name} {key}": full(value) for key, value in self.optimizer.state[p].items()}
        return {name: value.clone() for name, value in found.items()}


def same(found, expected):
    """Assert that two results agree to the bit."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), f"{key} of shape {tuple(value.shape)}"


class Allocations(TorchDispatchMode):
    """Counts ops whose result has memory that none of their arguments had and that is not a view of it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented
        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before and x.numel():
                self.found.append((str(func), tuple(x.shape)))
        return result

"""Every call that is refused: (call, error, words). In one process, and on every rank, where nothing is written."""

import re
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.experimental import implicit_replication

from ragged_shard import RaggedDTensor, RaggedShard, StridedRaggedShard, distribute_like, distribute_tensor
from ragged_shard import _geometry as geo
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.dist import raise_on_all_ranks
from ragged_shard.state_dict import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from ragged_shard.testing import RankError, rank_mesh, run_ranks, simulated_ranks

Table = dict[str, tuple[Any, Any, str]]
HALVES, RAGGED, OTHER = RaggedShard((0,), (1, 1)), RaggedShard((0,), (3, 0, 1)), RaggedShard((0,), (1, 1, 2))
FULL = torch.arange(24.0).view(4, 3, 2)
ANY: Any = RaggedShard  # called with what its types forbid


def validate(placements, mesh_shape, shape):
    geo.validate(placements, geo.ragged_axis(placements), mesh_shape, shape)


def simulate(ranks=2, **options):
    with simulated_ranks(ranks, **options):
        pass


def simulate_twice():
    with simulated_ranks(2), simulated_ranks(2):
        pass


def reduce_product():
    with simulated_ranks(2):
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT)


def freeze(placement):
    placement.dims = (1,)


ONE: Table = {
    **{f"{dims} in {units}": (partial(ANY, dims, units), error, words) for dims, units, error, words in (
        ((1,), (1, 1), ValueError, "not a prefix"), ((0, 2), (1, 1), ValueError, "not a prefix"),
        ((1, 0), (1, 1), ValueError, "not a prefix"), ((-1,), (1, 1), ValueError, "not a prefix"),
        ((0,), (), ValueError, "one share >= 0 for each rank"), ((0,), (0, 0), ValueError, "at least one > 0"),
        ((0,), (1, -1), ValueError, "one share >= 0"), ((), (1, 1), ValueError, "no dimension to cut"),
        (0, (1, 1), TypeError, "sequence of integers"), ((0,), (1.5, 1), TypeError, "sequence of integers"))},
    "a factor of 0": (lambda: StridedRaggedShard((0,), (1, 1), split_factor=0), ValueError, "at least 1"),
    "frozen": (lambda: freeze(HALVES), AttributeError, "frozen"),
    **{f"{placements} of {shape} on {mesh}": (partial(validate, placements, mesh, shape), error, words)
       for placements, mesh, shape, error, words in (
           ((RaggedShard((0,), (1, 2)),), (2,), (4, 3), ValueError, "not divisible by sum.local_units.=3"),
           ((HALVES,), (3,), (4, 3), ValueError, "2 local_units for a mesh axis of 3"),
           ((RaggedShard((0, 1), (1, 1)),), (2,), (4,), ValueError, "of a 1-d tensor"),
           ((HALVES,), (2,), (), ValueError, "of a 0-d tensor"),
           ((HALVES,), (2, 2), (4,), ValueError, "expected 2 placements"),
           ((HALVES, Shard(0)), (2, 2), (4, 4), ValueError, "cut goes through dim 0"),
           ((RaggedShard((0, 1), (1, 3)), Shard(1)), (2, 2), (2, 4), ValueError, "cut goes through dim 1"),
           ((HALVES, Shard(2)), (2, 2), (4, 4), ValueError, "is outside the dimensions"),
           ((HALVES,) * 2, (2, 2), (4, 4), NotImplementedError, "only one mesh axis"),
           ((HALVES, Partial("max")), (2, 2), (4, 4), NotImplementedError, "cannot be combined"),
           ((StridedRaggedShard((0,), (1, 1), 2), Replicate()), (2, 2), (4, 4), ValueError, "make no slices"),
           ((StridedRaggedShard((0,), (1, 1), 4), Shard(0)), (2, 2), (8, 4), ValueError, "split_factor=4"),
           ((StridedRaggedShard((0,), (1, 1), 2), Shard(0)), (2, 2), (6, 4), ValueError, "in the slice at"),
           ((Shard(0), RaggedShard((0,), (1, 2))), (2, 2), (8, 2), ValueError,
            "not divisible by sum.local_units.=3; |in the slice at"),
           ((Shard(0), StridedRaggedShard((0,), (1, 1), 2)), (2, 2), (12, 2), ValueError,
            "to its right make no slices"))},
    "an error of one process": (lambda: raise_on_all_ranks(TypeError("wrong"), "load"), TypeError, "^load: wrong$"),
    # -- ranks of tests
    "a lambda on ranks": (lambda: run_ranks(2, lambda: None), TypeError, "top-level function"),
    "no ranks": (lambda: run_ranks(0, dist.get_rank), ValueError, "at least 1 rank"),
    "ranks on a TPU": (lambda: run_ranks(1, dist.get_rank, device="tpu"), ValueError, "'cpu' or an accelerator"),
    "a lock as a result": (lambda: run_ranks(2, threading.Lock), RankError, "cannot pickle"),
    "1000 devices": (lambda: run_ranks(1000, dist.get_rank, device="cuda"), RuntimeError, "need as many devices"),
    **{f"simulated {options}": (partial(simulate, **options), ValueError, "a rank below the world size")
       for options in ({"rank": 2}, {"rank": -1}, {"collectives": "guess"})},
    "simulated twice": (simulate_twice, RuntimeError, "is initialised already"),
    "a simulated product": (reduce_product, NotImplementedError, "SUM, AVG"),
}  # fmt: skip


@pytest.mark.parametrize("row", ONE)
def test_a_call_that_makes_no_sense_is_refused_by_name(row):
    call, error, words = ONE[row]
    with pytest.raises(error, match=words):
        call()


# -- on every rank -----------------------------------------------------------------------------------------------------


def spread(tensor=FULL, *placements, mesh=None):
    """A ragged tensor; each call makes another one."""
    return distribute_tensor(tensor.clone(), mesh or rank_mesh(3), placements or [RAGGED], src_data_rank=None)


def replicated(tensor):
    return DTensor.from_local(tensor, rank_mesh(3), [Replicate()])


def by_torch(*placements, mesh=None):
    return torch_distribute_tensor(FULL, mesh or rank_mesh(3), placements or [Shard(0)])


def pending(number=1):
    mesh, ragged = rank_mesh(1, 3), RAGGED
    local = spread(FULL * number, Replicate(), ragged, mesh=mesh).to_local()
    return RaggedDTensor.from_local(local, mesh, [Partial(), ragged], shape=FULL.shape)


def unscale(tensor):
    torch._amp_foreach_non_finite_check_and_unscale_([tensor], torch.zeros(1), torch.ones(1))


def fused_step(param):
    moment, theirs, step = spread(), by_torch(RAGGED), torch.tensor(1.0)
    torch._fused_adam_(
        [param], [spread()], [theirs], [moment], [], [step], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def set_data(value):
    spread().data = value


def assign(tensor, mask, value=1.0):
    tensor[mask] = value


def implicit():
    with implicit_replication():
        spread() + torch.ones(7)


def from_local(**change):
    """A local tensor of four rows by three, of which rank 1 has none."""
    rows = (3, 0, 1)[dist.get_rank()]
    local = torch.zeros(rows, 3)
    usual = {"local": local, "device_mesh": rank_mesh(3), "placements": [RAGGED], "shape": (4, 3)}
    arguments: Any = usual | change
    return RaggedDTensor.from_local(**arguments)


def plain_with_ragged(make):
    """A plain DTensor, or its spec, with a ragged placement."""
    cases = (
        ([RAGGED], (3,)), ([RAGGED, Replicate()], (3, 1)), ([Shard(1), RAGGED], (1, 3)), ([RAGGED, Shard(0)], (3, 1)),
        ([Shard(0), RAGGED], (1, 3)), ([StridedRaggedShard((0,), RAGGED.local_units, 1), Shard(0)], (3, 1)),
    )  # fmt: skip
    for placements, shape in cases:
        mesh = rank_mesh(*shape)
        with pytest.raises(NotImplementedError, match="a plain DTensor cannot have this placement"):
            make(mesh, placements)
    make(rank_mesh(3), [RAGGED])


def on_one_rank(which):
    """Make a tensor of which rank 1 is told something else."""
    odd, mesh = dist.get_rank() == 1, rank_mesh(3)
    rows, dtype = (1, 1, 2)[dist.get_rank()], torch.float64 if odd and which == "dtype" else torch.float32
    if which in ("local shape", "dtype"):
        local = torch.zeros(5 if odd and which == "local shape" else rows, 3, dtype=dtype)
        return RaggedDTensor.from_local(local, mesh, [OTHER], shape=(4, 3), check=True)
    others = {"units": (2, 1, 1), "shares that do not divide": (2, 1, 2)}
    units = others.get(which if odd else "", (1, 1, 2))
    full = torch.zeros(5 if odd and which == "full shape" else 4, 3)
    return distribute_tensor(full, mesh, [RaggedShard((0,), units)])


def outside_of_the_mesh():
    mesh = DeviceMesh("cpu", [0, 1])
    RaggedDTensor.from_local(torch.zeros(2), mesh, [HALVES], shape=(4,))
    if dist.get_rank() < 2:
        raise ValueError("this rank is not in the row's error")  # but in the mesh


def backward_elsewhere():
    spread().requires_grad_().to_local(grad_placements=[Replicate()]).sum().backward()


def step_of(name):
    param: Any = nn.Parameter(spread(torch.randn(8, 4)))
    before = param.to_local().clone()
    param.grad = torch.ones_like(param)
    try:
        getattr(torch.optim, name)([param], lr=0.1).step(*[lambda: torch.ones(())] * (name == "LBFGS"))
    finally:
        assert torch.equal(param.to_local(), before)


def meta_on_one_rank():
    module = nn.Module()
    part = torch.zeros(2, 2, device="meta" if dist.get_rank() == 1 else "cpu")
    module.w = nn.Parameter(
        RaggedDTensor.from_local(part, rank_mesh(3), [RaggedShard((0,), (1, 1, 1))], shape=(6, 2))
    )
    load_full_state_dict(module, {"w": torch.zeros(6, 2)}, rank0_only=True)


class Unreadable(dict[str, Any]):
    """Values that are read from a file when they are asked for."""

    def __getitem__(self, name):
        raise FileNotFoundError(f"{name} cannot be read")


def model(device="cpu"):
    module = nn.Module()
    module.weight = nn.Parameter(spread(torch.zeros(4, 6, device=device)))
    module.vector = nn.Parameter(spread(torch.zeros(8, device=device)))
    module.register_buffer("steps", torch.zeros(2, dtype=torch.int16))
    return module


def on_rank_0(full, rank0_only):
    return full if not rank0_only or dist.get_rank() == 0 else {}


def load(change, rank0_only, device="cpu"):
    """Load a state dict that does not fit: nothing is written."""
    module = model(device)
    steps = torch.ones(2, dtype=torch.int16)
    full: Any = {"weight": torch.ones(4, 6), "vector": torch.ones(8), "steps": steps}
    if change == "file":
        full = Unreadable(full)
    else:
        full = {name: value for name, value in (full | change).items() if value is not None}
    try:
        load_full_state_dict(module, on_rank_0(full, rank0_only), rank0_only=rank0_only)
    finally:
        assert device == "meta" or not any(value.any() for value in full_state_dict(module).values())


def load_optimizer(change, rank0_only):
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    full = full_optimizer_state_dict(module, optimizer)
    if change is None:
        del full["param_groups"]
    elif change == "vector":
        del full["state"]["vector"]
    else:
        full["state"]["weight"].update(change)
    try:
        load_full_optimizer_state_dict(module, optimizer, on_rank_0(full, rank0_only), rank0_only=rank0_only)
    finally:
        assert not optimizer.state[module.weight]["exp_avg"].any()


OTHERS, PENDING = "different shardings|not distributed (like|as)", "pending reduction"
ON_3: Table = {
    # -- operands
    **{f"operand {number}": (call, ValueError, words) for number, (call, words) in enumerate((
        (lambda: spread().requires_grad_() + spread(FULL, OTHER), "autograd records this op"),
        (lambda: spread() * by_torch().requires_grad_(), r"(?s)\(3, 0, 1\).*Shard.*autograd records this op"),
        (lambda: spread(FULL, Replicate(), RAGGED, mesh=rank_mesh(1, 3)) + pending(), OTHERS),
        (lambda: spread().add_(spread(FULL[:, :2], OTHER)), r"\(3, 0, 1\)"),
        (lambda: spread() + spread(FULL, Replicate(), OTHER, mesh=rank_mesh(1, 3)), OTHERS),
        (lambda: torch.add(spread(FULL[:, :1]), 1.0, out=spread()), r"out= of shape \(4, 3, 2\)"),
        (lambda: torch.add(spread(), 1.0, out=by_torch()), "not distributed like"),
        (lambda: spread() + FULL, r"plain tensor of shape \(4, 3, 2\) together with a ragged one"),
        (lambda: FULL - spread(), "implicit_replication"), (lambda: torch.maximum(spread(), FULL), "implicit_repl"),
        (lambda: spread().copy_(FULL), "plain tensor"),
        (lambda: torch.tensor(1.0).add_(spread(torch.ones(()), RaggedShard((), (1, 0, 0)))),
         "writes an operand that is not distributed"),
        (lambda: spread() + replicated(torch.ones(5)), "does not broadcast"),
        (lambda: spread() + replicated(torch.ones(2, 4, 3, 2)), "does not broadcast"),
        (implicit, "does not broadcast"), (lambda: fused_step(spread()), "writes tensor 0 of exp_avgs"),
        (lambda: distribute_like(torch.zeros(3), spread()), r"shape \(3,\) like one of \(4, 3, 2\)")))},
    "other data": (lambda: set_data(FULL), TypeError, "can only be another ragged tensor"),
    **({"their operand": (lambda: by_torch().mul_(spread()), ValueError, OTHERS),
        "their list": (lambda: torch._foreach_add_([by_torch()], [spread()]), ValueError, OTHERS)}
       if SUBCLASSES_DTENSOR else {}),
    **{f"mask {number}": (call, (NotImplementedError, ValueError), "") for number, call in enumerate((
        lambda: assign(spread(), FULL > 0.5), lambda: assign(spread(), spread(FULL > 0.5, OTHER)),
        lambda: assign(spread(), spread() > 3, spread())))},
    **{f"no rule {number}": (call, NotImplementedError, words) for number, (call, words) in enumerate((
        (lambda: spread().expand(2, 4, 3, 2), "has no rule for a ragged tensor"),
        (lambda: spread(FULL, RAGGED, Shard(2), mesh=rank_mesh(3, 1)).view(4, 6).t(), "has no rule|not"),
        (lambda: pending().new_empty(2, 3), "placements of another shape"),
        (lambda: spread().set_(torch.zeros(24).untyped_storage(), 0, (24,), (1,)), r"use RaggedDTensor\.from_local"),
        (lambda: spread().new_zeros(()).set_(torch.zeros(1).untyped_storage(), 0, (1,), (1,)),
         r"use RaggedDTensor\.from_local")))},
    "orthogonal in place": (lambda: spread(torch.ones(8, 4)).t_(), (NotImplementedError, RuntimeError), ""),
    "QR": (lambda: torch.linalg.qr(spread(torch.ones(8, 4))), (NotImplementedError, RuntimeError), ""),
    **{f"pending {number}": (call, NotImplementedError, PENDING) for number, call in enumerate((
        lambda: pending() + 1, lambda: pending() * pending(), lambda: 1 / pending(), lambda: pending().sqrt(),
        lambda: pending().norm(), lambda: pending().max(), lambda: torch.ones_like(pending()),
        lambda: pending().fill_(1), lambda: torch._foreach_norm([pending()]), lambda: pending() > 0,
        lambda: torch._foreach_add([pending()], 1.0),
        lambda: torch._foreach_addcmul([pending()], [pending()], [pending()]), lambda: pending().to(torch.int32),
        lambda: unscale(pending()), lambda: pending().div(2, rounding_mode="floor"),
        lambda: torch.equal(pending(), pending()), lambda: pending().any(),
        lambda: torch._foreach_sqrt_([pending()])))},
    "pending chunks": (lambda: pending().__create_chunk_list__(), ValueError, "cannot save or load a pending"),
    "pending items": (lambda: pending().__create_write_items__("w", pending()), ValueError, "cannot save"),
    "gradients elsewhere": (backward_elsewhere, ValueError, "grad_placements"),
    "row 6": (lambda: spread(torch.zeros(4, 2)).select(0, 6), IndexError, "index 6 is out of bounds for 4 rows"),
    # -- making
    **{f"from_local {number}": (partial(lambda change: from_local(**change()), change), error, words)
       for number, (change, error, words) in enumerate((
           (lambda: {"local": torch.zeros(5, 3)}, ValueError, r"shape \(5, 3\), but .* a local tensor of shape \("),
           (lambda: {"local": torch.zeros(7)}, ValueError, r"a local tensor of shape \("),
           (lambda: {"stride": (1, 4)}, ValueError, r"not contiguous for shape \(4, 3\)"),
           (lambda: {"stride": (1,)}, ValueError, "for a 2-d shape"),
           (lambda: {"device_mesh": "cpu"}, TypeError, "expected a DeviceMesh"),
           (lambda: {"shape": (5, 3)}, ValueError, "not divisible"),
           (lambda: {"placements": [RAGGED] * 2}, ValueError, "expected 1 placements"),
           (lambda: {"local": replicated(torch.zeros(2, 3))}, TypeError, "plain tensor")))},
    "the class": (lambda: RaggedDTensor(FULL), TypeError, ""),
    "of a DTensor": (lambda: spread(by_torch()), TypeError, "use redistribute"),
    "norm of integers, which a rank has none of": (lambda: spread(FULL.long(), RAGGED).norm(), RuntimeError,
                                                  "floating point"),
    # -- elements that rank 1 has none of
    **{f"dtype {number}": (call, (RuntimeError, NotImplementedError), "implemented|support")
       for number, call in enumerate((
           lambda: spread(FULL.long()).softmax(1), lambda: spread(FULL > 3).argmax(1), lambda: spread(FULL > 3).std(1),
           lambda: spread(FULL.to(torch.uint16)).amax(1), lambda: spread(FULL.to(torch.uint16)).amax(0),
           lambda: spread(FULL.to(torch.uint16)).max(), lambda: spread(FULL.to(torch.complex64)).nansum(0),
           lambda: spread(FULL.to(torch.float8_e4m3fn)).norm()))},
    **{f"0 {number}": (call, RuntimeError, "ZeroDivisionError") for number, call in enumerate((
        lambda: spread(FULL.long()) // 0, lambda: spread(FULL.long()) % 0, lambda: spread(FULL.long()).fmod_(0),
        lambda: spread(FULL.long()).div(0, rounding_mode="trunc"), lambda: spread(FULL > 3) // 0,
        lambda: spread(FULL.long()).floor_divide_(replicated(torch.tensor(0)))))},
    "nothing ragged": (lambda: distribute_tensor(FULL, rank_mesh(3), [Shard(0)]), ValueError, "no ragged placement"),
    "rank 5's data": (lambda: distribute_tensor(FULL, rank_mesh(3), [RAGGED], src_data_rank=5), ValueError,
                      "src_data_rank=5"),
    **{f"on one rank: {which}": (partial(on_one_rank, which), (ValueError, TypeError), "")
       for which in ("local shape", "dtype", "units", "shares that do not divide", "full shape")},
    "outside of a mesh": (outside_of_the_mesh, ValueError, "this rank is not in"),
    **{f"plain, {number}": (partial(plain_with_ragged, make), NotImplementedError, "cannot have this placement")
       for number, make in enumerate((
           lambda mesh, placements: DTensor.from_local(torch.zeros(4, 2), mesh, placements),
           lambda mesh, placements: DTensor.from_local(torch.zeros(4, 2), mesh, placements, shape=torch.Size([4, 2]),
                                                       stride=(2, 1)),
           lambda mesh, placements: DTensorSpec(mesh, tuple(placements))))},
    "torch's redistribute": (lambda: by_torch().redistribute(placements=[RAGGED]), NotImplementedError,
                             r"Use ragged_shard\.distribute_tensor, distribute_like, redistribute"),
    **{f"redistribute {number}": (call, error, words) for number, (call, error, words) in enumerate((
        (lambda: spread().redistribute(), ValueError, "needs placements"),
        (lambda: spread().redistribute(rank_mesh(1, 3), [RAGGED]), ValueError, "within a mesh"),
        (lambda: spread().redistribute(placements=[RaggedShard((0,), (1, 2, 2))]), ValueError, "not divisible"),
        (lambda: spread().redistribute(placements=[HALVES]), ValueError, "2 local_units for a mesh axis of 3"),
        (lambda: spread().redistribute(placements=[Replicate()] * 2), ValueError, "expected 1 placements"),
        (lambda: spread().redistribute(placements=[Partial()]), NotImplementedError, "nothing becomes Partial"),
        (lambda: RaggedDTensor.from_local(FULL.long(), rank_mesh(3), [Partial("avg")], shape=FULL.shape).redistribute(
            placements=[RAGGED]), TypeError, "floating point")))},
    # -- optimizers: they look at whole tensors, or at sparse gradients
    **{name: (partial(step_of, name), (NotImplementedError, RuntimeError), words) for name, words in {
        "Adafactor": "torch.optim.Adafactor.*cannot be used", "LBFGS": "aten.cat.default has no rule",
        "Muon": "aten.permute.default has no rule", "SparseAdam": "does not support dense gradients"}.items()},
    # -- state dicts
    "meta on one rank": (meta_on_one_rank, ValueError, "meta device"),
    "full of meta": (lambda: full_state_dict(model("meta")), ValueError, "meta device"),
    **{f"load {change}, {rank0_only}": (partial(load, change, rank0_only, **more), error, words)
       for rank0_only in (True, False) for change, error, words, more in (
           ({"weight": torch.zeros(6, 4)}, ValueError, r"weight: expected shape \(4, 6\), got \(6, 4\)", {}),
           ({"vector": None}, ValueError, r"missing names \['vector'\]", {}),
           ({"other": torch.zeros(1)}, ValueError, r"unexpected names \['other'\]", {}),
           ({"vector": 3}, TypeError, "vector: expected a full plain tensor", {}),
           ({"steps": torch.tensor([0.5, 6.5])}, (TypeError, ValueError),
            "steps: a tensor of torch.float32 for one of torch.int16", {}),
           ("file", FileNotFoundError, "cannot be read", {}),
           ({}, ValueError, "are on the meta device; allocate them by", {"device": "meta"}))},
    **{f"optimizer {change}, {rank0_only}": (partial(load_optimizer, change, rank0_only), (ValueError, TypeError), say)
       for rank0_only in (True, False) for change, say in (
           ({"exp_avg": torch.zeros(6, 4)}, r"weight.exp_avg: expected shape \(4, 6\), got \(6, 4\)"),
           ("vector", r"missing names \['vector.exp_avg', 'vector.exp_avg_sq', 'vector.step'\]"),
           ({"momentum": torch.zeros(4, 6)}, r"unexpected names \['weight.momentum'\]"),
           ({"exp_avg": torch.zeros(4, 6, dtype=torch.uint8)},
            "weight.exp_avg: a tensor of torch.uint8 for one of torch.float32"),
           ({"exp_avg": 3.0}, "weight.exp_avg: expected a full plain tensor, got float"),
           (None, "the state dict has no 'param_groups'"))},
}  # fmt: skip


def norms_over_different_ranks():
    mesh = rank_mesh(2, 2, names=("dp", "tp"))
    ragged = RaggedShard((0,), (1, 3))
    torch.nn.utils.get_total_norm(
        [spread(FULL, ragged, Shard(1), mesh=mesh), spread(FULL, ragged, mesh=mesh["dp"])]
    )


def mesh_without_rank_0():
    mesh, module = rank_mesh(2, 2, names=("replicate", "shard"))["shard"], nn.Module()
    module.w = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [RaggedShard((0,), (1, 3))]))
    load_full_state_dict(module, {"w": torch.ones(4, 2)}, rank0_only=True)


def two_meshes():
    half = rank_mesh(2, 2, names=("a", "b"))["b"]
    return spread(FULL, HALVES, mesh=half) + spread(FULL, RaggedShard((0,), (1, 1, 1, 1)), mesh=rank_mesh(4))


def permuted(ranks, cut):
    placements: list[Placement] = [Replicate(), Replicate()]
    placements[cut] = HALVES
    distribute_tensor(torch.arange(4.0), DeviceMesh("cpu", ranks), placements, src_data_rank=None)


ON_4: Table = {
    "norms over different ranks": (norms_over_different_ranks, NotImplementedError, "copies or other parameters"),
    "no rank 0": (mesh_without_rank_0, ValueError, "does not begin at rank 0"),
    "two meshes": (two_meshes, ValueError, "different shardings"),
    # Process groups go by ascending ranks, whatever the mesh says; all ranks hear of it.
    "permuted columns": (lambda: permuted([[1, 0], [2, 3]], 1), ValueError,
                         r"ranks \[1, 0\] of mesh\(cpu \(2, 2\)\) are not in the order"),
    "permuted rows": (lambda: permuted([[2, 3], [0, 1]], 0), ValueError,
                      r"ranks \[2, 0\] of mesh\(cpu \(2, 2\)\) are not in the order"),
}  # fmt: skip
RANKS = {3: ON_3, 4: ON_4}


def missed(number):
    """On a rank: the rows that are not refused, or in other words."""
    problems = []
    for name, (call, error, words) in RANKS[number].items():
        try:
            call()
        except Exception as raised:
            if not isinstance(raised, error) or not re.search(words, str(raised)):
                problems.append(f"{name}: {raised!r}")
        else:
            problems.append(f"{name}: not refused")
    return problems


@pytest.mark.parametrize("number", RANKS)
def test_every_rank_refuses(number):
    assert run_ranks(number, missed, number, timeout=120) == [[]] * number

"""What each rule of the op table does, against the same op on the plain tensor."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from ragged_shard import (
    RaggedDTensor,
    RaggedShard,
    StridedRaggedShard,
    distribute_like,
    distribute_tensor,
    redistribute,
)
from ragged_shard._ops.table import RULES
from ragged_shard._tensor import HANDLERS
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives

NO_MIXED_LISTS = pytest.mark.skipif(
    not SUBCLASSES_DTENSOR, reason="torch < 2.12: a list with a DTensor is DTensor's alone"
)
RAGGED = RaggedShard((0,), (3, 0, 1))
SHAPE = (4, 3, 2)


def plain(dtype=torch.float32, shape=SHAPE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -9
        return torch.randint(low, 9, shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator) + 0.25).to(dtype)


def spread(tensor, placements=(RAGGED,), mesh_shape=None):
    mesh = rank_mesh(*(mesh_shape or (dist.get_world_size(),)))
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def same(ragged, wanted, what, sharding=None):
    if not isinstance(wanted, torch.Tensor):
        assert ragged == wanted, what
        return
    assert isinstance(ragged, RaggedDTensor), what
    if sharding is not None:
        assert ragged.placements == sharding, what
    assert ragged.shape == wanted.shape, what
    assert ragged.dtype == ragged.to_local().dtype == wanted.dtype, what
    torch.testing.assert_close(ragged.full_tensor(), wanted, rtol=0, atol=0, equal_nan=True, msg=str(what))


VALUES = {
    "Tensor": "tensor", "Optional[Tensor]": None, "number": 2, "Union[complex, float, int]": 2, "Scalar": 2,
    "float": 2, "int": 1, "SymInt": 1, "Optional[str]": "floor", "str": "none", "bool": False,
}  # fmt: skip


def numbers(op):
    """Arguments beside the first tensor, by the op's schema: tensors like it, and numbers."""
    needed = [argument for argument in op._schema.arguments[1:] if not argument.has_default_value()]
    if any(str(argument.type) not in VALUES for argument in needed):
        return None
    return {argument.name: VALUES[str(argument.type)] for argument in needed}


@on_ranks(3, timeout=120)
def test_every_pointwise_op_is_the_plain_one_without_communication():
    tried = set()
    for name in RULES["pointwise"].ops.split():
        for spelling, dtype in itertools.product((name, name + "_"), (torch.float32, torch.int8, torch.bool)):
            packet = getattr(torch.ops.aten, spelling, None)
            for op in [] if packet is None else (getattr(packet, o) for o in packet.overloads()):
                given = numbers(op) if op in HANDLERS else None
                if given is None or str(op._schema.arguments[0].type) != "Tensor":
                    continue
                values = {k: plain(dtype, seed=1) if v == "tensor" else v for k, v in given.items()}
                if name == "masked_fill" or name == "where":
                    values = {k: v > 0.5 if k in ("mask", "condition") else v for k, v in values.items()}
                if name in ("masked_fill", "fill") and isinstance(values["value"], torch.Tensor):
                    values["value"] = torch.tensor(1).to(dtype)
                first = plain(dtype) > 0.5 if name == "where" else plain(dtype)
                try:
                    wanted = op(first.clone(), *values.values())
                except (RuntimeError, NotImplementedError, TypeError):
                    continue  # torch has no such op for the dtype
                ragged = {
                    k: spread(v) if isinstance(v, torch.Tensor) and v.ndim else v for k, v in values.items()
                }
                operand = spread(first)
                with record_collectives() as record:
                    got = op(operand, *ragged.values())
                assert record.kinds == [], op
                same(got, wanted, (op, dtype), (RAGGED,))
                assert (got is operand) == spelling.endswith("_"), op
                tried.add(name)
    missing = set(RULES["pointwise"].ops.split()) - tried
    # Schemas that the test makes no arguments for; they are called below.
    backward = {"threshold_backward", "elu_backward", "leaky_relu_backward"}
    assert missing <= {"clamp", "lerp", "nan_to_num", *backward}


@on_ranks(3)
def test_operators_take_ragged_replicate_and_number_operands():
    x, y = plain(), plain(seed=1)
    rx, ry = spread(x), spread(y)
    scalar = torch.tensor(3.0)
    replicate = DTensor.from_local(scalar, rx.device_mesh, [Replicate()])
    ours = rx.sum()
    cases = [  # what the schemas above do not ask for
        lambda a, b: 2 - a, lambda a, b: 2**a, lambda a, b: a // 0.3, lambda a, b: (a > 0.5) & (b < 0.5),
        lambda a, b: torch.where(a > b, a, 0.0), lambda a, b: a.clamp(0.3, 0.7), lambda a, b: a.clamp(min=0.5),
        lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: torch.lerp(a, b, a), lambda a, b: a.nan_to_num(),
        lambda a, b: a.to(torch.bfloat16), lambda a, b: a.double(), lambda a, b: a.int(), lambda a, b: a.isinf(),
        lambda a, b: torch.addcmul(a, a, b, value=2), lambda a, b: a.add(b, alpha=3), lambda a, b: a.round(decimals=1),
        lambda a, b: torch.zeros_like(a), lambda a, b: torch.ones_like(a, dtype=torch.int64),
        lambda a, b: torch.full_like(a, 7), lambda a, b: torch.empty_like(a).fill_(2), lambda a, b: a.clone(),
        lambda a, b: a.detach(), lambda a, b: a.contiguous(), lambda a, b: a.new_zeros(a.shape),
        lambda a, b: a.new_full(a.shape, 5), lambda a, b: torch.maximum(a, b, out=torch.empty_like(a)), lambda
        a, b: torch.zeros_like(a).copy_(b),
    ]  # fmt: skip
    for i, case in enumerate(cases):
        with record_collectives() as record:
            got = case(rx, ry)
        assert record.kinds == [], i
        same(got, case(x, y), i, (RAGGED,))
    for number in (scalar, replicate, ours, 3.0):
        value = float(ours.item() if number is ours else 3.0)
        same(rx * number, x * torch.tensor(value), "0-d", (RAGGED,))
        if number is replicate and not SUBCLASSES_DTENSOR:
            continue  # torch < 2.12: a DTensor as the first operand never asks the second
        same(number + rx, torch.tensor(value) + x, "0-d first", (RAGGED,))
        changed = rx.clone().mul_(number)
        same(changed, x * torch.tensor(value), "0-d in place", (RAGGED,))
    for small in (torch.arange(2.0), torch.arange(3.0).view(3, 1), torch.arange(4.0).view(4, 1, 1), y):
        operand = DTensor.from_local(small, rx.device_mesh, [Replicate()])
        with record_collectives() as record:
            got = rx + operand
        assert record.kinds == []
        same(got, x + small, "Replicate", (RAGGED,))
        same(rx.clone().mul_(operand), x * small, "Replicate in place", (RAGGED,))


@on_ranks(3)
def test_foreach_ops_follow_each_tensors_own_placements():
    xs = [plain(seed=i) for i in range(4)]
    ys = [plain(seed=i + 9) for i in range(4)]
    placements = [RAGGED, RaggedShard((0, 1), (1, 1, 2)), RaggedShard((0,), (0, 1, 0)), RAGGED]
    rxs, rys = ([spread(v, [p]) for v, p in zip(vs, placements, strict=True)] for vs in (xs, ys))
    number = torch.tensor(2.0)
    cases = [
        lambda a, b: torch._foreach_add(a, b), lambda a, b: torch._foreach_mul(a, 3.0),
        lambda a, b: torch._foreach_mul(a, number), lambda a, b: torch._foreach_sqrt(a),
        lambda a, b: torch._foreach_lerp(a, b, 0.25), lambda a, b: torch._foreach_addcdiv(a, a, b, value=2),
        lambda a, b: torch._foreach_addcmul(a, a, b, [1.0, 2.0, 3.0, 4.0]), lambda a, b: torch._foreach_neg(a),
        lambda a, b: torch._foreach_pow(a, 2), lambda a, b: torch._foreach_maximum(a, b),
        lambda a, b: torch._foreach_div(a, [1.0, 2.0, 3.0, 4.0]), lambda a, b: torch._foreach_reciprocal(a),
        lambda a, b: torch._foreach_sub(a, b, alpha=2), lambda a, b: torch._foreach_clamp_min(a, 0.5),
    ]  # fmt: skip
    for i, case in enumerate(cases):
        with record_collectives() as record:
            got = case(rxs, rys)
        assert record.kinds == [], i
        for a, b, p in zip(got, case(xs, ys), placements, strict=True):
            same(a, b, i, (p,))
    torch._foreach_mul_(rxs, rys)
    torch._foreach_mul_(xs, ys)
    torch._foreach_copy_(rys, rxs)
    torch._foreach_zero_(rxs[:1])
    for a, b in zip(rys, xs, strict=True):
        same(a, b, "in place")
    same(rxs[0], torch.zeros(SHAPE), "zero")


@NO_MIXED_LISTS
@on_ranks(3)
def test_lists_that_mix_ragged_tensors_dtensors_and_plain_ones_are_split():
    mesh = rank_mesh(3)
    x, y = plain(), plain(seed=5)
    theirs = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
    local = torch.ones(3)
    lists = [theirs, spread(y), local]
    results: Any = torch._foreach_mul(lists, 2.0)
    assert type(results[0]) is DTensor
    assert torch.equal(results[0].full_tensor(), x * 2)
    same(results[1], y * 2, "ragged", (RAGGED,))
    assert torch.equal(results[2], local * 2)
    torch._foreach_add_(lists, lists)
    assert torch.equal(lists[0].full_tensor(), x * 2)
    same(lists[1], y * 2, "ragged")
    norms: Any = torch._foreach_norm([theirs, spread(y)])
    values = [n.full_tensor().item() for n in norms]
    assert values == pytest.approx([(x * 2).norm().item(), y.norm().item()])


@on_ranks(4)
def test_equal_slices_of_a_mesh_are_one_mesh():
    mesh = rank_mesh(2, 2, names=("replicate", "shard"))
    x = plain()
    tensors: list[Any] = [
        distribute_tensor(x, mesh["shard"], [RaggedShard((0,), (1, 3))], src_data_rank=None) for _ in range(3)
    ]
    with record_collectives() as record:
        norms = torch._foreach_norm(tensors)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, torch.zeros(1), torch.ones(1))
    assert record.kinds == ["all_reduce"] * 2
    assert norms[2].item() == pytest.approx(x.norm().item(), rel=1e-6)
    assert torch.equal((tensors[0] + tensors[1]).full_tensor(), x + x)


@on_ranks(3)
def test_equal_gives_every_rank_the_same_answer():
    x = plain()
    rx = spread(x)
    assert torch.equal(rx, rx.clone())
    other = x.clone()
    other[0, 0, 0] += 1
    assert not torch.equal(rx, spread(other))
    assert not torch.equal(rx, spread(plain(shape=(4, 3))))
    assert torch.allclose(rx, spread(x + 1e-9))
    assert not torch.allclose(rx, spread(other))


@on_ranks(3)
def test_views_that_keep_the_cuts_share_storage_and_others_are_refused():
    x = plain()
    rx = spread(x)
    storage = rx.to_local().data_ptr()
    for shape in ((4, 6), (2, 2, 3, 2), (24,), (4, 3, 2, 1), (4, 1, 6), (12, 2)):
        view = rx.view(shape)
        assert view.to_local().data_ptr() == storage
        same(view, x.view(shape), shape)
        same(view.view(SHAPE), x, shape)
    same(rx.unsqueeze(-1), x.unsqueeze(-1), "unsqueeze")
    same(rx.unsqueeze(-1).squeeze(-1), x, "squeeze")
    same(rx.flatten(1), x.flatten(1), "flatten")
    same(rx.reshape(4, -1), x.reshape(4, -1), "reshape")
    same(rx.view_as(rx), x, "view_as")
    rx.view(-1).mul_(2)
    same(rx, x * 2, "written through a view")
    same(rx.view(6, 4), rx.full_tensor().view(6, 4), "another grouping", (RaggedShard((0, 1), (3, 0, 1)),))
    mixed = spread(x, (RAGGED, Shard(2)), (3, 1))
    same(mixed.view(SHAPE), x, "the same shape")
    with pytest.raises(NotImplementedError, match="has no rule for a ragged tensor"):
        mixed.view(4, 6)


DRAWS: dict[str, Any] = {
    "uniform_": lambda t: t.uniform_(-2, 3), "normal_": lambda t: t.normal_(1, 2), "bernoulli_": lambda t:
    t.bernoulli_(0.3), "cauchy_": lambda t: t.cauchy_(), "exponential_": lambda t: t.exponential_(2.0),
    "geometric_": lambda t: t.geometric_(0.5), "log_normal_": lambda t: t.log_normal_(), "random_": lambda t:
    t.random_(0, 9), "kaiming": lambda t: torch.nn.init.kaiming_uniform_(t, a=5**0.5),
    "truncated": lambda t: torch.nn.init.trunc_normal_(t, std=0.02),
    "own generator": lambda t: t.normal_(generator=torch.Generator().manual_seed(7)),
}  # fmt: skip
DRAWS_LIKE = {
    "rand_like": torch.rand_like, "randn_like": torch.randn_like, "randint_like": lambda t: torch.randint_like(t, 9),
    "other dtype": lambda t: torch.randn_like(t, dtype=torch.float64),
}  # fmt: skip


@on_ranks(6)
def test_a_tensor_is_filled_from_parts_that_are_drawn_on_all_ranks():
    """As initializers of fused weights do."""
    rx = spread(plain(shape=(4, 3)), (Replicate(), RAGGED), (2, 3))
    torch.manual_seed(dist.get_rank())
    parts = [rx.new_empty(2, 3) for _ in range(2)]
    for part in parts:
        assert part.placements == (Replicate(), Replicate())
        part.normal_()
    rx.copy_(torch.cat(parts))
    torch.manual_seed(0)  # rank 0's values, on all ranks
    assert torch.equal(rx.full_tensor(), torch.randn(4, 3))


@on_ranks(6)
def test_random_ops_draw_the_plain_tensors_values_and_replicas_agree():
    assert set(RULES["random"].ops.split()) <= {*DRAWS, *DRAWS_LIKE}
    for name, draw in (DRAWS | DRAWS_LIKE).items():
        for placements, mesh_shape, collectives in (
            ((RaggedShard((0,), (2, 0, 1, 0, 1, 0)),), (6,), []),
            ((RaggedShard((0, 1), (2, 0, 1)), Shard(2)), (3, 2), []),
            ((Replicate(), RAGGED), (2, 3), ["broadcast"]),
        ):
            x, rx = plain(), spread(plain(), placements, mesh_shape)
            before = rx.to_local().data_ptr()
            torch.manual_seed(3)
            wanted = draw(x)
            after = torch.rand(1)
            torch.manual_seed(3)
            with record_collectives() as record:
                drawn = draw(rx)
            assert (drawn is rx) == (name in DRAWS), name
            if name != "truncated":  # which in torch >= 2.13 asks, with an all-reduce, whether to draw again
                assert record.kinds == collectives, name
            assert torch.equal(torch.rand(1), after), name
            assert rx.to_local().data_ptr() == before, name
            same(rx, x, name, tuple(placements))
            same(drawn, wanted, name, tuple(placements))
    # Replicas with other seeds agree all the same.
    rx = spread(plain(), (Replicate(), RAGGED), (2, 3))
    torch.manual_seed(dist.get_rank())
    for drawn in (
        rx.normal_(),
        torch.randn_like(rx),
        torch.rand_like(rx.redistribute(placements=[Replicate()] * 2)),
    ):
        copies = [torch.empty_like(drawn.to_local()) for _ in range(2)]
        dist.all_gather(copies, drawn.to_local().contiguous(), group=rx.device_mesh.get_group(0))
        assert torch.equal(*copies)


@pytest.mark.parametrize(
    ("placements", "mesh_shape"),
    [((RAGGED,), (3,)), ((RaggedShard((0,), (0, 0, 1)),), (3,)), ((Replicate(), RAGGED), (1, 3))],
)
@on_ranks(3)
def test_writes_take_dtensors_that_torch_made_of_ragged_placements(placements, mesh_shape):
    x, y = plain(), plain(seed=5)
    for write in (
        lambda p, v: p.copy_(v),
        lambda p, v: p.add_(v, alpha=-2.0),
        lambda p, v: p.mul_(v),
        lambda p, v: p.lerp_(v, 0.25),
        lambda p, v: torch._foreach_copy_([p], [v]),
        lambda p, v: torch._foreach_lerp_([p], [v], 0.25),
    ):
        rx, wanted = spread(x, placements, mesh_shape), x.clone()
        theirs = torch_distribute_tensor(y, rx.device_mesh, rx.placements)
        with record_collectives() as record:
            write(rx, theirs)
        assert record.kinds == ["all_to_all"]
        write(wanted, y)
        same(rx, wanted, "written", placements)


OTHERS = [RaggedShard((0,), (1, 1, 2)), RaggedShard((0, 1), (0, 5, 1)), RaggedShard((0,), (0, 1, 0))]


@on_ranks(3)
def test_operands_that_are_cut_elsewhere_are_redistributed_by_one_exchange_with_a_warning():
    x, y, z = plain(), plain(seed=5), plain(seed=6)
    cases = [
        lambda a, b, c: a + b, lambda a, b, c: a.copy_(b), lambda a, b, c: a.data.copy_(b), lambda a, b, c: a.add_(b),
        lambda a, b, c: a.lerp_(b, 0.25), lambda a, b, c: torch.lerp(a, b, c), lambda a, b, c: a.addcmul_(b, c),
        lambda a, b, c: torch.addcdiv(a, b, c), lambda a, b, c: torch.where(a > 0.5, b, c),
        lambda a, b, c: a.clamp(b, c), lambda a, b, c: torch.maximum(b, c, out=a), lambda a, b, c: a.double() * b,
    ]  # fmt: skip
    for i, case in enumerate(cases):
        for placement in OTHERS:
            rx = spread(x)
            with (
                record_collectives() as record,
                pytest.warns(UserWarning, match="redistributed in every call"),
            ):
                got = case(rx, spread(y, [placement]), spread(z, [placement]))
            assert record.kinds == ["all_to_all"], i
            wanted = x.clone()
            same(got, case(wanted, y, z), (i, placement), (RAGGED,))
            same(rx, wanted, (i, placement), (RAGGED,))
    rx, ry = spread(x), spread(y, OTHERS[:1])
    with pytest.warns(UserWarning, match="redistributed in every call"):
        assert [torch.equal(rx, ry), torch.allclose(rx, ry, atol=9.0)] == [False, True]


@on_ranks(3)
def test_lists_that_are_cut_elsewhere_are_redistributed_by_one_exchange_for_each_dtype():
    dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32, torch.float64]
    xs, ys = ([plain(dtype, seed=i + n) for i, dtype in enumerate(dtypes)] for n in (0, 9))
    placements = [*OTHERS, RAGGED, *OTHERS[:2]]
    for case in (
        lambda a, b: torch._foreach_lerp_(a, b, 0.25), lambda a, b: torch._foreach_add_(a, b, alpha=0.5),
        lambda a, b: torch._foreach_copy_(a, b), lambda a, b: torch._foreach_sub(a, b),
    ):  # fmt: skip
        rxs, wanted = [spread(x) for x in xs], [x.clone() for x in xs]
        rys = [spread(y, [placement]) for y, placement in zip(ys, placements, strict=True)]
        with record_collectives() as record, pytest.warns(UserWarning, match="redistributed in every call"):
            got = case(rxs, rys)
        assert record.kinds == ["all_to_all"] * 2
        for a, b in zip(got or rxs, case(wanted, ys) or wanted, strict=True):
            same(a, b, "list", (RAGGED,))


@on_ranks(4)
def test_operands_on_meshes_of_two_axes_are_redistributed():
    x, y, mesh = plain(shape=(8, 6)), plain(shape=(8, 6), seed=5), (2, 2)
    strided = (StridedRaggedShard((0,), (1, 1), 2), Shard(0))
    each: list[tuple[Any, ...]] = [
        (Replicate(), RaggedShard((0,), (1, 3))), (Replicate(), RaggedShard((0, 1), (5, 1))), strided,
        (Shard(1), RaggedShard((0,), (3, 1))), (Replicate(), Shard(1)),
    ]  # fmt: skip
    for first, second in itertools.permutations(each, 2):
        if first is each[-1]:
            continue  # nothing ragged: torch's DTensors are written by their own rules
        ry = spread(y, each[0], mesh).redistribute(placements=second)
        rx = spread(x, first, mesh)
        with pytest.warns(UserWarning, match="redistributed in every call"):
            same(rx - ry, x - y, (first, second), first)
    rxs = [spread(x, p, mesh) for p in each[:1] * 3]
    with record_collectives() as record, pytest.warns(UserWarning, match="redistributed"):
        got: Any = torch._foreach_sub(rxs, [spread(y, each[1], mesh) for _ in rxs])
    assert record.kinds == ["all_to_all"]
    same(got[2], x - y, "list", each[0])


@on_ranks(3)
def test_the_result_of_out_is_the_tensor_that_was_passed():
    x, y = plain(), plain(seed=1)
    rx, into = spread(x), spread(x)
    got = torch.ops.aten.tanh_backward.grad_input(rx, spread(y), grad_input=into)
    assert got is into
    same(into, torch.ops.aten.tanh_backward(x, y), "grad_input", (RAGGED,))
    same(rx, x, "not written")


@pytest.mark.skipif(
    not SUBCLASSES_DTENSOR, reason="torch < 2.12: a DTensor as the first operand never asks the second"
)
@on_ranks(3)
def test_the_ways_out_that_errors_about_other_placements_name_work():
    x, y = plain(), plain(seed=5)
    rx = spread(x)
    theirs = torch_distribute_tensor(y, rx.device_mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"ragged_shard.redistribute.*ragged.redistribute"):
        theirs.copy_(rx)
    theirs.copy_(rx.redistribute(placements=theirs.placements))
    assert torch.equal(theirs.full_tensor(), x)
    other = torch_distribute_tensor(y, rank_mesh(1, 3), [Replicate(), Shard(0)])
    with pytest.raises(ValueError, match=r"(?s)ragged_shard.redistribute.*ragged_shard.distribute_like"):
        rx - other
    same(rx - distribute_like(other.full_tensor(), rx), x - y, "on another mesh")
    with pytest.raises(TypeError, match=r"ragged_shard.redistribute of a DTensor"):
        rx.data = theirs
    rx.data = redistribute(theirs, placements=rx.placements)
    same(rx, x, "assigned")


@pytest.mark.parametrize("shape", [(6, 4), (3, 8), (3, 4, 2)])
@on_ranks(3)
def test_orthogonal_initialization_gives_the_plain_tensors_values(shape):
    for placements, mesh_shape in (
        ((RaggedShard((0,), (2, 0, 1)),), (3,)),
        ((RaggedShard((0, 1), (1, 1, 1)),), (3,)),
        ((Replicate(), RaggedShard((0,), (2, 0, 1))), (1, 3)),
    ):
        rx, x = torch.nn.Parameter(spread(plain(shape=shape), placements, mesh_shape)), plain(shape=shape)
        torch.manual_seed(3)
        torch.nn.init.orthogonal_(x, gain=1.5)
        torch.manual_seed(3)
        torch.nn.init.orthogonal_(rx, gain=1.5)
        same(rx, x, "initialized", placements)


@on_ranks(4)
def test_a_pending_sum_takes_linear_ops():
    x, y = plain(), plain(seed=1)
    mesh = rank_mesh(2, 2)
    ragged = RaggedShard((0,), (1, 3))
    mine = [v * (0.25 if dist.get_rank() < 2 else 0.75) for v in (x, y)]
    px, py = (
        RaggedDTensor.from_local(
            spread(v, (Replicate(), ragged), (2, 2)).to_local(), mesh, [Partial(), ragged], shape=SHAPE
        )
        for v in mine
    )
    settled = lambda t: t.redistribute(placements=[Replicate(), ragged]).full_tensor()  # noqa: E731
    for got, wanted in [
        (px + py, x + y), (px - py, x - y), (px * 2, x * 2), (2 * px, x * 2), (px / 4, x / 4), (-px, -x),
        (px.clone(), x), (torch.zeros_like(px), x * 0), (px * torch.tensor(3.0), x * 3), (px.to(torch.float64),
        x.double()),
        (torch._foreach_mul([px], 2.0)[0], x * 2), (torch._foreach_add([px], [py])[0], x + y),
        (px.view(4, 6), x.view(4, 6)),
    ]:  # fmt: skip
        torch.testing.assert_close(settled(got) if got.shape == x.shape else got.full_tensor(), wanted)
    px2 = px.clone().add_(py)
    torch.testing.assert_close(settled(px2), x + y)
    total = px.sum()
    assert total.placements == (Partial(), Replicate())
    torch.testing.assert_close(total.full_tensor(), x.sum())


@on_ranks(3)
def test_implicit_replication_takes_plain_tensors_to_be_the_same_on_all_ranks():
    x, y = plain(), plain() * 2
    rx, row = spread(x), torch.tensor([3.0, 5.0])
    assert rx.shape[-1] == 2
    calls: list[Any] = [lambda a, b: a + b, lambda a, b: b - a, torch.maximum]
    for call in calls:
        for plain_operand in (y, row, torch.tensor(4.0)):
            with implicit_replication():
                same(call(rx, plain_operand), call(x, plain_operand), "implicit")
    with implicit_replication():
        same(torch.where(rx > y, rx, row), torch.where(x > y, x, row), "implicit")
        same(torch._foreach_add([rx], [y])[0], x + y, "implicit")
        same(torch._foreach_mul([rx, x], [y, y])[0], x * y, "implicit")
        rx.mul_(y)
    same(rx, x * y, "implicit")
    with implicit_replication():
        rx.copy_(x)
    same(rx, x, "implicit")


@on_ranks(3)
def test_comm_debug_mode_counts_collectives_inside_ops():
    x = plain()
    rx, other = spread(x), spread(x)
    reduce_ops = torch.ops.c10d.allreduce_
    calls = [
        rx.norm, rx.sum, rx.max, rx.any, lambda: rx.mean(0), lambda: torch._foreach_norm([rx, other]),
        lambda: torch.equal(rx, other),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_([rx], torch.zeros(1), torch.ones(1)),
    ]  # fmt: skip
    for call in calls:
        with CommDebugMode() as mode, record_collectives() as record:
            call()
        assert mode.get_total_counts() == mode.get_comm_counts()[reduce_ops] == len(record.events) == 1, call
    hsdp = spread(x, (Replicate(), RAGGED), (1, 3))
    with CommDebugMode() as mode:
        hsdp.uniform_()
        rx.add_(1)
        rx.sum(dim=2)
    assert mode.get_total_counts() == 0
    parameters = [torch.nn.Parameter(rx), torch.nn.Parameter(other)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with CommDebugMode() as mode:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.optim.AdamW(parameters).step()
    assert mode.get_total_counts() == 1  # one reduction for the list: foreach code was chosen


@on_ranks(3)
def test_a_mask_of_the_same_placements_selects_what_to_overwrite():
    x = plain()
    rx = spread(x)
    rx[rx > 0.5] = 7.0
    x = torch.where(x > 0.5, 7.0, x)
    same(rx, x, "masked")


WRITES = {
    "in place": lambda x: x.mul_(2),
    "out=": lambda x: torch.add(x, x, out=x),
    "copy_": lambda x: x.copy_(x * 2),
    "fill": lambda x: x.zero_(),
    "through .data": lambda x: x.data.mul_(2),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "a fused optimizer": lambda x: torch._fused_sgd_(
        [x], [x * 1], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False,
    ),
    "random numbers": lambda x: x.uniform_(),
}  # fmt: skip


@on_ranks(3)
def test_a_write_counts_in_the_local_tensors_version():
    for kind, write in WRITES.items():
        x = spread(plain())
        local = x.to_local()
        assert local._version == x._local_tensor._version
        before, values = local._version, local.clone()
        write(x)
        assert local._version > before, kind
        assert values.numel() == 0 or not torch.equal(local, values), kind
        before = local._version
        x.sum(), x + 1, x.detach().mul(2), torch._foreach_mul([x], 2.0)
        assert local._version == before, kind

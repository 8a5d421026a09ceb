"""Norms and statistics of ragged tensors."""

import contextlib
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import get_total_norm, parameters_to_vector

from ragged_shard import RaggedDTensor, RaggedShard, StridedRaggedShard, distribute_tensor
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import on_ranks, rank_mesh, record_collectives

NO_MIXED_LISTS = pytest.mark.skipif(
    not SUBCLASSES_DTENSOR, reason="torch < 2.12: a list with a DTensor is DTensor's alone"
)
RAGGED = RaggedShard((0,), (3, 0, 1))
SHAPE = (4, 3, 2)


def plain(shape=SHAPE, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.25


def spread(tensor, placements=(RAGGED,), mesh_shape=None):
    mesh = rank_mesh(*(mesh_shape or (dist.get_world_size(),)))
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


@on_ranks(3)
def test_norms_are_right_to_1e_6_and_lists_take_one_collective():
    x, rx = plain(shape=SHAPE) - 0.6, spread(plain(shape=SHAPE) - 0.6)
    for order in (1, 2, 3.5, float("inf"), 0, -1, float("-inf")):
        for got, wanted in [
            (torch.linalg.vector_norm(rx, order), torch.linalg.vector_norm(x, order)),
            (torch.norm(rx, order), torch.norm(x, order)),
        ]:
            assert got.to_local().item() == pytest.approx(wanted.item(), rel=1e-6), order
    for order in (1, 2, float("inf")):
        with record_collectives() as record:
            several = torch._foreach_norm([rx, rx * 2, rx.double().float()], order)
        assert record.kinds == ["all_reduce"]
        wanted = torch.linalg.vector_norm(x, order).item()
        assert [n.item() for n in several] == pytest.approx([wanted, 2 * wanted, wanted], rel=1e-6)
    huge = spread(torch.full(SHAPE, 3.9e18))  # the sum of squares overflows fp32, no rank's own does
    assert torch.linalg.vector_norm(huge).item() == pytest.approx(3.9e18 * 24**0.5, rel=1e-6)


@on_ranks(3)
def test_norms_of_complex_tensors_are_real():
    x = torch.randn(4, 3, dtype=torch.complex64)
    rx = distribute_tensor(x, rank_mesh(3), [RaggedShard((0,), (3, 0, 1))], src_data_rank=None)
    for order, dim in itertools.product((2, 3.0, 0, math.inf, -math.inf), (None, 0, 1)):
        got, wanted = (torch.linalg.vector_norm(t, order, dim) for t in (rx, x))
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got.full_tensor(), wanted)


@on_ranks(4)
def test_norms_of_hsdp_tensors_reduce_over_the_ragged_axis_only():
    x = plain()
    tensor = spread(x, (Replicate(), RaggedShard((0,), (1, 3))), (2, 2))
    both = spread(x, (RaggedShard((0,), (1, 3)), Shard(1)), (2, 2))
    strided = spread(x, (StridedRaggedShard((0,), (1, 1), 2), Shard(0)), (2, 2))
    left = spread(x, (Shard(1), RaggedShard((0,), (1, 3))), (2, 2))
    with record_collectives() as record:
        norm = torch._foreach_norm([tensor])[0]
    assert record.kinds == ["all_reduce"]
    assert record.events[0].ranks == 2
    assert record.bytes_sent == 8
    for found in (norm, *torch._foreach_norm([both, strided, left])):
        assert found.item() == pytest.approx(x.norm().item(), rel=1e-6)
    for dim in (0, 1, 2, (0, 2)):
        for ragged in (tensor, both, strided):
            torch.testing.assert_close(ragged.sum(dim).full_tensor(), x.sum(dim))


def several_meshes():
    """Parameters on meshes of the same ranks, each with a gradient; and the same in one process."""
    dense = rank_mesh(4, names=("fsdp",))
    sparse = rank_mesh(2, 2, names=("efsdp", "ep"))
    copies = rank_mesh(2, 2, names=("replicate", "shard"))
    ragged = RaggedShard((0,), (1, 3))
    grads = [plain(seed=seed) for seed in range(6)]
    held: list[Any] = [
        distribute_tensor(grads[0], dense, [RaggedShard((0,), (1, 2, 0, 1))], src_data_rank=None),
        distribute_tensor(
            grads[1], sparse, [StridedRaggedShard((0,), (1, 1), 2), Shard(0)], src_data_rank=None
        ),
        distribute_tensor(grads[2], copies, [Replicate(), ragged], src_data_rank=None),
        DTensor.from_local(grads[3], sparse, [Replicate()] * 2).redistribute(
            placements=[Replicate(), Shard(1)]
        ),
        grads[4].clone(),
        distribute_tensor(grads[5].double(), dense, [RaggedShard((0,), (1, 2, 0, 1))], src_data_rank=None),
    ]
    grads[5] = grads[5].double()
    return held, grads


@NO_MIXED_LISTS
@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
@on_ranks(4)
def test_torchs_clipping_takes_any_mix_of_meshes_plain_tensors_and_dtensors(foreach, order):
    held, grads = several_meshes()
    grad: Any
    params = [torch.empty_like(grad) for grad in held]
    twins = [torch.empty_like(grad) for grad in grads]
    for param, grad in zip([*params, *twins], [*held, *grads], strict=True):
        param.grad = grad
    with record_collectives() as record:
        norm: Any = torch.nn.utils.clip_grad_norm_(params, 0.5, order, foreach=foreach)
    wanted = torch.nn.utils.clip_grad_norm_(twins, 0.5, order, foreach=foreach)
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
    for param, twin in zip(params, twins, strict=True):
        grad = param.grad
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(full, twin.grad, rtol=1e-6, atol=1e-7)
    assert set(record.kinds) == {"all_reduce"}
    if foreach is None:  # fp32 over all ranks, and over the pairs of "shard" and "ep"; fp64 over all
        assert len(record.kinds) == 3


NAMES = {
    "torch": torch, "F": F, "INF": float("inf"), "get_total_norm": get_total_norm,
    "parameters_to_vector": parameters_to_vector,
}  # fmt: skip
# Of a weight w (6, 4), its gradient g, a bias b (12,), its gradient h and a stack of matrices e (3, 4, 2).
ANSWERED = """
w.norm() w.norm(1) w.norm(float('inf')) w.norm(-float('inf')) w.norm(0) w.norm(3) w.norm(dim=0) w.norm(dim=1)
w.norm(dim=1,keepdim=True) torch.linalg.norm(w) torch.linalg.vector_norm(w,1)
torch.linalg.vector_norm(w,dim=(0,1))
w.norm().item() w.square().sum().sqrt() w.pow(2).mean().sqrt() get_total_norm([w,b]) get_total_norm([g,h],1.0)
torch._foreach_norm([w,b])[0] torch.stack([w.norm(),b.norm()]) torch.stack([w.norm(),b.norm()]).norm()
torch.linalg.matrix_norm(w) torch.linalg.norm(b,2)
w.sum() w.sum(0) w.sum(1) w.sum(-1,keepdim=True) w.sum((0,1)) e.sum(2) e.sum((0,2)) b.sum() b.sum().item()
w.sum(dtype=torch.float64)
w.mean() w.mean(0) w.mean(1) w.mean(dtype=torch.float64) w.mean().item() b.mean() e.mean(0) e.mean((1,2))
w.nansum()
w.nanmean() w.abs().mean() w.abs().max() w.abs().max().item() w.abs().sum() w.clone().mean() w.double().mean()
w.std() w.std(0) w.std(1) w.std(unbiased=False) w.std(correction=0) w.std().item() w.var() w.var(0) w.var(1)
w.var(unbiased=False)
w.var(1,keepdim=True) b.std() b.var() e.std() e.var(2) e.std((0,1)) torch.std_mean(w) torch.var_mean(w)
torch.var_mean(w,0)
w.prod() b.prod() w.prod(0) w.prod(1) w.max() w.min() w.amax() w.amin() w.amax(0) w.amax(1) w.amin((0,1))
w.max().item()
w.aminmax() torch.maximum(w,g).max() w.argmax() w.argmin() w.argmax().item() b.argmax() w.max(0) w.max(1)
w.max(1)[0] w.argmax(1) w.argmax(0)
w.count_nonzero() w.count_nonzero(0) (w>0).sum() (w>0).float().mean() (w==0).sum() (w==0).float().mean().item()
torch.count_nonzero(w>0)
w.any() (w>9).any() (w==w).all() w.isnan().any() w.isinf().any() w.isnan().any().item() torch.isfinite(w).all()
w.isnan().sum()
(w>0).any(0) (w>0).all(1) bool(w.isfinite().all()) (w!=g).any() w.logical_not().sum()
torch.histc(w,bins=5) torch.histc(w,bins=4,min=-1,max=1) w.histc(bins=8)
w.sort(1) w.kthvalue(2) w.cumsum(1)
w.median(1) w.topk(2,1)
(w*g).sum() (w*g).mean() torch.dot(b,h) torch.vdot(b,h) (b*h).sum()
F.cosine_similarity(w.flatten(),g.flatten(),dim=0) F.cosine_similarity(w,g,dim=1)
F.cosine_similarity(b,h,dim=0) torch.dist(w,g) (w-g).norm() (w-g).abs().max() F.mse_loss(w,g) F.l1_loss(w,g)
torch.equal(w,w) torch.allclose(w,g)
(g.norm()/w.norm()).item() (g/w.norm()).norm() (w*1e-3).norm() F.mse_loss(w,g,reduction='sum')
torch.sum(w*g)/(w.norm()*g.norm())
w.logsumexp(0) w.logsumexp((0,1)) w.logsumexp(1) w.softmax(1) w.log_softmax(1) w.softmax(0) F.normalize(b,dim=0)
w[0] w[-1] w[:2] w[1:4] w[:2].norm() w[0].norm() w[0,0] w[0,0].item() w[5].sum() b[0] b[:3] b[3].item()
b[2:5].mean()
w.narrow(0,1,3) w.select(0,2) e[0] e[1].norm() e[:2] e[0,1] b[-1].item()
w.flatten()[:3] w.view(-1)[7].item()
w.view(-1) w.flatten() w.reshape(-1).norm() w.flatten()[0] w.view(-1).sum() w.reshape(3,2,4).sum(2) w.squeeze()
w.unsqueeze(0)
w.chunk(2) w.split(2) w.split(3)[0].norm() w.unbind(0) float(w.norm()) int((w>0).sum()) w.numel() w.shape len(w)
w.dim() w.nelement()
w.detach().cpu().norm() w.bfloat16().norm() w.float().std() torch.matmul(b,h)
F.relu(w).mean() w.sigmoid().mean() w.clamp(-1,1).mean() torch.where(w>0,w,g).sum() w.log1p().nan_to_num().sum()
w.sign().sum() w.exp().sum().log()
(w.abs()<1e-2).float().mean() w.abs().log10().mean() w.abs().log2().floor().amax() torch.numel(w)
w.abs().mean(1) w.norm(dim=1).max() w.norm(dim=0).mean() w.norm(dim=1).std()
""".split()  # noqa: SIM905
# One reduction or a look at what this rank holds does not answer them; nothing is gathered behind the user's back.
REFUSED = """
w.median() w.quantile(0.5) w.flatten().topk(3) b.topk(2) b.sort() b.cumsum(0) w.unique()
w.flatten().quantile(0.9) w.nanquantile(0.5) F.normalize(w,dim=1) w[:,0] w[:,:2] w[...,0] w[::2] w.t() w.T.norm()
w.transpose(0,1) w.mT w.permute(1,0) torch.cat([w,g]) torch.cat([w.flatten(),b]) torch.stack([w,g])
torch.stack([w,g]).mean(0) parameters_to_vector([w,b]) torch.cat([b,h]).norm() w.tolist() w@g.t()
torch.mm(w,g.t()) w.trace() w.diagonal() w.tril() torch.outer(b,h) F.linear(g,w) w.sort(0) w.topk(2,0) w.bernoulli()
w.bernoulli_(torch.full((6,4),0.5)) torch.sum(w,0,out=torch.empty_like(w)) w.detach().resize_(3) w.new_zeros(3)
F.embedding(torch.tensor([0]),w) w.view(6,2,2,1).clone(memory_format=torch.channels_last) w.expand(2,6,4)
""".split()  # noqa: SIM905


def values():
    torch.manual_seed(0)
    shapes = {"w": (6, 4), "g": (6, 4), "b": (12,), "h": (12,), "e": (3, 4, 2)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


# Shares of the rows of w, b and e, or of their elements.
ROWS = ((2, 0, 4), (5, 0, 7), (1, 2, 0))
ELEMENTS = ((7, 0, 17), (5, 0, 7), (10, 14, 0))


def tensors(layout):
    w, b, e = ELEMENTS if layout == "elements" else ROWS
    mesh, others = (rank_mesh(1, 3), [Replicate()]) if layout == "hybrid" else (rank_mesh(3), [])
    shares = {"w": w, "g": w, "b": b, "h": b, "e": e}
    made = {}
    for name, value in values().items():
        dims = tuple(range(value.ndim)) if layout == "elements" else (0,)
        made[name] = nn.Parameter(distribute_tensor(value, mesh, [*others, RaggedShard(dims, shares[name])]))
    return made


def full(value):
    if isinstance(value, DTensor | RaggedDTensor):
        return value.full_tensor()
    return tuple(map(full, value)) if isinstance(value, list | tuple) else value


def right(expression, arguments, plain):
    expected = full(eval(expression, NAMES, plain))
    answer = full(eval(expression, NAMES, arguments))
    torch.testing.assert_close(answer, expected, rtol=1e-2 if "bfloat16" in expression else 1e-5, atol=1e-6)


@on_ranks(3)
def test_statistics_are_those_of_plain_tensors_or_refused_by_name():
    plain, arguments = values(), {layout: tensors(layout) for layout in ("rows", "hybrid", "elements")}
    for expression in ANSWERED:
        right(expression, arguments["rows"], plain)
        with torch.no_grad():
            right(expression, arguments["hybrid"], plain)
    for expression in ANSWERED:  # where cuts lie inside rows, some are refused; none is wrong
        with contextlib.suppress(NotImplementedError, ValueError):
            right(expression, arguments["elements"], plain)
    with torch.no_grad():
        for expression in REFUSED:
            with (
                record_collectives() as record,
                pytest.raises((NotImplementedError, ValueError, RuntimeError), match=r"aten|not supported"),
            ):
                pytest.fail(f"{expression}: {eval(expression, NAMES, arguments['rows'])}")
            assert record.kinds == [], expression
    with pytest.raises(NotImplementedError, match=r"aten\.t\.default.*ragged.*full_tensor\(\)"):
        arguments["rows"]["w"].t()


@on_ranks(3)
def test_a_number_that_all_ranks_have_formats_as_a_plain_one():
    weight, plain = tensors("rows")["w"], values()["w"]
    norms = torch._foreach_norm([weight.detach()])
    with record_collectives() as record:
        assert f"{norms[0]:.3f}" == f"{plain.norm():.3f}"
        if dist.get_rank() == 0:
            assert f"{norms[0]}" == f"{plain.norm()}"
    assert f"{weight.norm():8.2e} {(weight > 0).sum():d}" == f"{plain.norm():8.2e} {(plain > 0).sum():d}"
    assert record.kinds == []


@on_ranks(3)
def test_formatting_a_number_that_one_rank_has_sends_nothing_and_names_the_way_out():
    number = spread(torch.tensor(2.5), [RaggedShard((), (0, 1, 0))])
    with record_collectives() as record, pytest.raises(TypeError, match=r"item\(\)"):
        f"{number:.3f}"
    assert record.kinds == []
    assert f"{number.item():.3f}" == "2.500"
    assert "RaggedDTensor" in f"{number}"


@on_ranks(3)
def test_rows_are_views_and_writes_through_views_count_as_writes_of_the_tensor():
    weight, plain = tensors("rows")["w"], values()["w"]
    local = weight.to_local().detach()
    for value in (weight.detach(), plain):
        value[0] = 3.0
        value[2:5].mul_(2)
        value[-1].zero_()
        value[3, 1] = 7.0
        value.view(-1)[5:9].add_(1)
        value.split(2)[1].neg_()
    assert torch.equal(weight.full_tensor(), plain)
    before = weight.local._version
    weight.detach().view(-1).zero_()
    weight.detach()[:].zero_()
    assert weight.local._version >= before + 2
    assert not local.any()


NAN, INF = float("nan"), float("inf")
SPECIAL = [
    [1.0, NAN, 2.0],
    [NAN, 1.0, 2.0],
    [1.0, 2.0, NAN],
    [INF, 1.0, INF],
    [-INF, -INF, -INF],
    [2.0, 2.0, 2.0],
    [-0.0, 0.0, 1e30],
    [1e4, 1e4, 10001.0],
]
OF_SPECIAL = """
x.argmax() x.argmin() x.max(0) x.min(0) x.std() x.var() x.prod() x.logsumexp(0) x.softmax(0) x.log_softmax(0)
x.nansum() x.count_nonzero() x.aminmax() x[0].item() x[2].item() torch.var_mean(x,0)[0] torch.dot(x,x)
x.max() x.min() x.sum() (x/1e20).norm() x.norm(INF) torch._foreach_norm([x/1e20])[0] torch._foreach_norm([x],INF)[0]
x.amax(0)
""".split()  # noqa: SIM905


@on_ranks(3)
def test_statistics_of_special_numbers_are_those_of_plain_tensors():
    mesh, units = rank_mesh(3), (1, 0, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for row in SPECIAL:
            plain = torch.tensor(row, dtype=dtype)
            ragged = distribute_tensor(plain, mesh, [RaggedShard((0,), units)])
            for expression in OF_SPECIAL:
                expected = full(eval(expression, NAMES, {"x": plain}))
                answer = full(eval(expression, NAMES, {"x": ragged}))
                rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
                what = f"{expression} of {row} as {dtype}: {answer} for {expected}"
                torch.testing.assert_close(answer, expected, rtol=rtol, atol=1e-6, equal_nan=True, msg=what)

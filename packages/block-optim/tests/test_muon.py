"""Muon on one rank: torch's numbers, options against plain references, states, errors."""

import math
from typing import Any

import pytest
import torch
from runs import MATRICES, STACKS, tensors

from block_optim import Muon, orthogonalize
from block_optim.muon.bucket import lr_ratio
from block_optim.muon.coefficients import NAMES


def parameters(shapes=MATRICES, seed=0, dtype=torch.float32):
    return [torch.nn.Parameter(t) for t in tensors(shapes, seed, dtype)]


def give_gradients(params, seed):
    for p, grad in zip(params, tensors([p.shape for p in params], seed), strict=True):
        p.grad = grad.to(p.dtype)


def copies(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def equal(params, others):
    return all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def step_all(*pairs, seed=1):
    """Give the parameters of each (parameters, optimizer) the same gradients, and step."""
    for params, optimizer in pairs:
        give_gradients(params, seed)
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"momentum": 0.5, "ns_steps": 3, "eps": 1e-3},
        {"lr": torch.tensor(0.03)},
        {"ns_coefficients": (3.0, -4.0, 1.9), "ns_steps": 4, "adjust_lr_fn": "original"},
    ],
)
def test_single_matrices_get_the_bits_of_torch_muon_for_twelve_steps(options):
    options = {"lr": 0.02, **options}
    params = parameters()
    twins = copies(params)

    def groups(some):
        return [{"params": some[:4]}, {"params": some[4:], "weight_decay": 0.3}]

    ours, theirs = Muon(groups(params), **options), torch.optim.Muon(groups(twins), **options)
    for step in range(12):
        step_all((params, ours), (twins, theirs), seed=step)
        for optimizer in (ours, theirs):
            if not isinstance(options["lr"], torch.Tensor):
                optimizer.param_groups[0]["lr"] *= 0.9
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])


def interleaved(tensor):
    """The rows 12, 4 and 4 of each of two groups."""
    return [part.flatten(0, 1) for part in tensor.view(2, 20, 6).split((12, 4, 4), 1)]


@pytest.mark.parametrize(
    ("shape", "how", "matrices_of"),
    [
        ((3, 8, 6), "auto", torch.unbind),
        ((2, 3, 8, 6), "stack", lambda t: t.flatten(0, 1).unbind()),
        ((24, 6), "heads:4", lambda t: t.chunk(4)),
        ((20, 6), "rows:12,4,4", lambda t: t.split((12, 4, 4))),
        ((2, 20, 6), "rows:12,4,4", lambda t: [m for one in t for m in one.split((12, 4, 4))]),
        ((40, 6), "rows:12,4,4*2", interleaved),
        ((4, 3, 3, 3), "auto", lambda t: [t.flatten(1)]),
        ((4, 5, 3), "flatten", lambda t: [t.flatten(1)]),
        ((0, 4), "auto", lambda t: []),
    ],
)
def test_the_matrices_of_a_tensor_are_updated_as_separate_parameters_would_be(shape, how, matrices_of):
    (param,) = parameters([shape])

    def matrices(tensor):
        return [m.contiguous() for m in matrices_of(tensor.detach())]

    twins = [torch.nn.Parameter(m.clone()) for m in matrices(param)]
    ours, theirs = (
        Muon([param], lr=0.1, matrices=how),
        torch.optim.Muon(twins or parameters([(1, 1)]), lr=0.1),
    )
    for step in range(2):
        give_gradients([param], step)
        for twin, grad in zip(twins, matrices(param.grad), strict=True):
            twin.grad = grad
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(matrices(param), twins, strict=True))


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("name", NAMES)
def test_batches_of_one_shape_agree_with_single_matrices_within_the_tolerance(name, method):
    params = parameters([(24, 64)] * 4 + [(3, 24, 64)])
    twins = copies(params)
    options: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "ns_coefficients": name, "method": method}
    ours, theirs = (Muon(some, batched=b, **options) for some, b in ((params, True), (twins, False)))
    step_all((params, ours), (twins, theirs), seed=1)
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, atol=2e-2, rtol=0)


def test_only_the_bad_matrix_of_a_batch_falls_back():
    params = parameters([(8, 12)] * 3)
    twins, before = copies(params), params[1].detach().clone()
    options: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "batched": True, "skip_nonfinite": False}
    ours, theirs = Muon(params, **options), Muon(twins, **options)
    for some, optimizer in ((params, ours), (twins, theirs)):
        give_gradients(some, 1)
        if some is params:
            some[1].grad.fill_(math.inf)
        optimizer.step()
    assert (ours.fallbacks, theirs.fallbacks) == (1, 0)
    assert params[1].equal(before)
    for i in (0, 2):
        torch.testing.assert_close(params[i], twins[i], atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        (None, 2.0),
        ("original", 2.0),
        ("match_rms_adamw", 0.2 * math.sqrt(48)),
        ("spectral_unclamped", 2.0),
        ("none", 1.0),
    ],
)
def test_the_learning_rate_is_adjusted_to_the_shape(name, ratio):
    assert lr_ratio(name, 48, 12) == pytest.approx(ratio)
    assert lr_ratio("spectral_unclamped", 12, 48) == pytest.approx(0.5)
    assert lr_ratio(None, 12, 48) == 1.0
    p = torch.nn.Parameter(torch.zeros(48, 12))
    p.grad = tensors([(48, 12)], 3)[0]
    Muon([p], lr=0.5, weight_decay=0, adjust_lr_fn=name, momentum=0).step()
    want = -0.5 * ratio * orthogonalize(p.grad).float()
    torch.testing.assert_close(p.detach(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_normuon_is_the_papers_equations(adjust):
    """O = NS(M); v = b v + (1-b) mean_cols(O*O); O' = O/(sqrt(v)+eps); step 0.2 lr sqrt(mn)/|O'| (or by the shape)."""
    shapes = [(12, 8), (8, 20), (2, 6, 9)]
    params = parameters(shapes)
    optimizer = Muon(params, lr=0.03, weight_decay=0.1, normuon=True, normuon_beta2=0.9, adjust_lr_fn=adjust)
    weights = [p.detach().double().clone() for p in params]
    momenta = [torch.zeros_like(w) for w in weights]
    seconds = [torch.zeros(*w.shape[:-1], 1, dtype=torch.float64) for w in weights]
    for step in range(4):
        give_gradients(params, step)
        for w, m, v, p in zip(weights, momenta, seconds, params, strict=True):
            m.lerp_(p.grad.double(), 0.05)
            direction = p.grad.double().lerp(m, 0.95)
            o = orthogonalize(direction.float()).double()
            v.lerp_(o.square().mean(-1, keepdim=True), 0.1)
            o = o / (v.sqrt() + 1e-8)
            rows, columns = w.shape[-2:]
            norm = torch.linalg.matrix_norm(o, keepdim=True)
            if adjust == "match_rms_adamw":
                size = 0.2 * math.sqrt(rows * columns)
            else:
                size = math.sqrt(max(1, rows / columns)) * math.sqrt(min(rows, columns))
            w.mul_(1 - 0.03 * 0.1).sub_(0.03 * size * o / norm)
        optimizer.step()
    for p, w, v in zip(params, weights, seconds, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=0, atol=1e-4)
        torch.testing.assert_close(optimizer.state[p]["second_moment"].double(), v, rtol=1e-3, atol=1e-7)


def test_cautious_decay_touches_only_entries_that_the_update_shrinks():
    p = torch.nn.Parameter(tensors([(6, 9)], 0)[0])
    start = p.detach().clone()
    p.grad = tensors([(6, 9)], 1)[0]
    update = orthogonalize(p.grad).float()
    Muon([p], lr=0.1, weight_decay=0.5, momentum=0, cautious_weight_decay=True).step()
    decayed = start * torch.where(update * start >= 0, 1 - 0.05, 1.0)
    torch.testing.assert_close(p.detach(), decayed - 0.1 * update, rtol=1e-5, atol=1e-7)
    assert (update * start < 0).sum() > 5
    assert (update * start > 0).sum() > 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_momentum_of_another_dtype_follows_the_same_path(dtype):
    params = parameters([(16, 24)], dtype=torch.bfloat16 if dtype == torch.float32 else torch.float32)
    twins = [torch.nn.Parameter(p.detach().float()) for p in params]
    ours, theirs = Muon(params, lr=0.05, momentum_dtype=dtype), Muon(twins, lr=0.05)
    for step in range(5):
        step_all((params, ours), (twins, theirs), seed=step)
    assert ours.state[params[0]]["momentum_buffer"].dtype == dtype
    torch.testing.assert_close(params[0].float(), twins[0].detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_gradients_may_have_another_dtype_than_their_parameter(dtype, grad_dtype):
    params, twins = ([torch.nn.Parameter(torch.ones(6, 9, dtype=dtype))] for _ in "ab")
    params[0].grad_dtype = grad_dtype
    ours, theirs = Muon(params, lr=0.05), Muon(twins, lr=0.05)
    for step in range(3):
        grad = torch.randn(6, 9, generator=torch.Generator().manual_seed(step)).bfloat16()
        params[0].grad, twins[0].grad = grad.to(grad_dtype), grad.to(dtype)
        ours.step()
        theirs.step()
    assert equal(params, twins)


@pytest.mark.parametrize("momentum_dtype", [None, torch.float32])
def test_parameters_of_several_dtypes_share_a_group(momentum_dtype):
    """As they would be updated alone."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    made = [
        [torch.nn.Parameter(parameters([(6, 9)], seed=i)[0].detach().to(d)) for i, d in enumerate(dtypes)]
        for _ in "ab"
    ]
    together = Muon(made[0], lr=0.1, momentum_dtype=momentum_dtype)
    alone = [Muon([p], lr=0.1, momentum_dtype=momentum_dtype) for p in made[1]]
    for step in range(2):
        for some in made:
            give_gradients(some, step)
        for optimizer in (together, *alone):
            optimizer.step()
    assert equal(*made)
    assert not torch.equal(made[0][2], made[0][2].float().double())  # fp64 is not rounded to fp32 on the way


def test_parameters_without_gradient_stay_as_torch_leaves_them():
    params = parameters()
    twins = copies(params)
    ours, theirs = Muon(params), torch.optim.Muon(twins)
    for step in range(3):
        for some, optimizer in ((params, ours), (twins, theirs)):
            give_gradients(some, step)
            some[step].grad = None
            some[-1].grad = None
            optimizer.step()
    assert equal(params, twins)
    assert not ours.state[params[-1]]["momentum_buffer"].any()


def test_an_orthogonalisation_that_fails_falls_back_and_is_counted():
    p = torch.nn.Parameter(torch.zeros(8, 6))
    p.grad = torch.full((8, 6), 1e25) * tensors([(8, 6)], 0)[0]
    optimizer = Muon([p], lr=0.1, weight_decay=0)
    optimizer.step()
    assert optimizer.fallbacks == 1
    assert 0.05 < float(torch.linalg.matrix_norm(p.detach(), 2)) < 0.15


def test_parameters_added_later_are_assigned_and_updated():
    params = parameters(((6, 4), (4, 6)))
    twins = copies(params)
    ours, theirs = Muon(params[:1]), Muon(twins)
    ours.add_param_group({"params": params[1:]})
    step_all((params, ours), (twins, theirs), seed=1)
    assert equal(params, twins)
    assert len(ours.assignment.domains[0].matrices) == 2


def test_small_buckets_change_nothing():
    params = parameters(MATRICES + STACKS)
    twins = copies(params)
    small, large = Muon(params, bucket_bytes=1), Muon(twins)
    for step in range(3):
        step_all((params, small), (twins, large), seed=step)
    assert equal(params, twins)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_single_matrices_get_the_bits_of_torch_muon():
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
    twins = copies(params)
    ours, theirs = Muon(params, lr=0.02, batched=False), torch.optim.Muon(twins, lr=0.02)
    for step in range(10):
        for some, optimizer in ((params, ours), (twins, theirs)):
            for p, grad in zip(some, tensors([p.shape for p in some], step), strict=True):
                p.grad = grad.cuda()
            optimizer.step()
    assert equal(params, twins)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_no_memory_is_allocated_in_a_step_after_the_first():
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters(MATRICES + STACKS)]
    optimizer = Muon(params, method="gram", skip_nonfinite=False)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    optimizer.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 2 * len(
        params
    )  # host reads of checks

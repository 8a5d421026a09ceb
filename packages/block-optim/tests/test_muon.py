"""Muon on one rank: torch's numbers, options against the reference, states."""

import math

import pytest
import torch
from runs import MATRICES, STACKS, tensors

from block_optim import Muon
from block_optim.muon.bucket import lr_ratio
from block_optim.muon.newton_schulz import orthogonalize, steps_of
from block_optim.muon.reference import muon_


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


@pytest.mark.parametrize(
    ("shape", "how", "matrices_of"),
    [
        ((3, 8, 6), "auto", torch.unbind),
        ((20, 6), (12, 4, 4), lambda t: t.split((12, 4, 4))),
        ((2, 20, 6), (12, 4, 4), lambda t: [m for one in t for m in one.split((12, 4, 4))]),
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"normuon": True},
        {"cautious_weight_decay": True},
        {"ns_coefficients": "quintic"},
    ],
)
def test_a_step_is_that_of_the_reference(options):
    params = parameters([(12, 8), (8, 20), (13, 7)])
    optimizer = Muon(params, lr=0.05, weight_decay=0.5, **options)
    weights = [p.detach().clone() for p in params]
    momenta = [torch.zeros_like(w) for w in weights]
    seconds = [torch.zeros(len(w), 1) if "normuon" in options else None for w in weights]
    for step in range(4):
        give_gradients(params, step)
        for p, w, m, v in zip(params, weights, momenta, seconds, strict=True):
            muon_(
                w, p.grad, m, v, lr=0.05, weight_decay=0.5, ratio=lr_ratio(None, *w.shape),
                nesterov=options.get("nesterov", True), cautious="cautious_weight_decay" in options,
                steps=steps_of(options.get("ns_coefficients", "keller")),
            )  # fmt: skip
        optimizer.step()
    for p, w, m, v in zip(params, weights, momenta, seconds, strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], m)
        torch.testing.assert_close(p.detach(), w, rtol=1e-5, atol=1e-5 if v is None else 1e-4)
        if v is not None:
            torch.testing.assert_close(optimizer.state[p]["second_moment"], v, rtol=1e-3, atol=1e-7)


class Doubled(Muon):
    """Muon with another polar factor."""

    def orthogonalize_(self, matrix, group, scratch):
        super().orthogonalize_(matrix, group, scratch)
        matrix.mul_(2)


def test_a_subclass_may_orthogonalise_in_another_way():
    params = parameters([(12, 8), (8, 20)])
    twins = copies(params)
    step_all((params, Doubled(params, lr=0.1, weight_decay=0)), (twins, Muon(twins, lr=0.2, weight_decay=0)))
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q)


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


def test_parameters_of_several_dtypes_share_a_group():
    """As they would be updated alone."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    made = [
        [torch.nn.Parameter(parameters([(6, 9)], seed=i)[0].detach().to(d)) for i, d in enumerate(dtypes)]
        for _ in "ab"
    ]
    together = Muon(made[0], lr=0.1)
    alone = [Muon([p], lr=0.1) for p in made[1]]
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_single_matrices_get_the_bits_of_torch_muon():
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
    twins = copies(params)
    ours, theirs = Muon(params, lr=0.02), torch.optim.Muon(twins, lr=0.02)
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
    optimizer = Muon(params)
    optimizer.skip_nonfinite = False
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    optimizer.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

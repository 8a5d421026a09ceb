"""AdamW against torch's, to the bit, and what a torch optimizer is expected to do."""

import copy
import gc
import io
import pickle
import sys

import pytest
import torch
from adamw_helpers import (
    EIGHT_BIT,
    GAP_FILL,
    KINDS,
    LEAST,
    full_gradients,
    full_tensors,
    make_optimizer,
    parameters,
)
from runs import Allocations

from block_optim import AdamW, AdamW8bit
from layout_planner import Elements, Rows, Tile

SHAPES = [(33, 17), (5,), (64, 64), (1,), (), (7, 3, 3), (304,)]


def flat(shapes, gap, fill):
    """Views of one buffer, with a few elements of something else between them."""
    buffer = torch.full((sum(torch.Size(s).numel() + gap for s in shapes),), fill)
    views, offset = [], 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        views.append(buffer[offset : offset + numel].view(shape))
        offset += numel + gap
    return buffer, views


def groups(params, lr):
    """Different options for neighbours."""
    return [
        {"params": params[:2]},
        {"params": params[2:4], "weight_decay": 0.0, "lr": lr * 0.2},
        {"params": params[4:], "betas": (0.8, 0.95), "eps": 1e-6},
    ]


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["float", "tensor"])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
def test_the_numbers_are_those_of_torchs_for_loop(gap, maximize, lr):
    generator = torch.Generator().manual_seed(0)
    buffer, views = flat(SHAPES, gap, GAP_FILL)
    _, grads = flat(SHAPES, gap, float("nan"))
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator))
    ours = [torch.nn.Parameter(view) for view in views]
    theirs = [torch.nn.Parameter(view.clone()) for view in views]
    optimizer = AdamW(groups(ours, lr), lr=lr, maximize=maximize)
    reference = torch.optim.AdamW(groups(theirs, lr), lr=lr, maximize=maximize, foreach=False)
    for step in range(5):
        for a, b, grad in zip(ours, theirs, grads, strict=True):
            grad.copy_(torch.randn(grad.shape, generator=generator) * 10)
            a.grad, b.grad = grad, grad.clone()
        if step == 2:
            ours[2].grad = theirs[2].grad = None
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert optimizer.state[a].keys() == reference.state[b].keys()
        for key, value in reference.state[b].items():
            assert torch.equal(optimizer.state[a][key], value), key
    assert (buffer == GAP_FILL).sum() == gap * len(SHAPES)


@pytest.mark.parametrize("shape", [(16, 16), (48,), (4, 3, 4)])
def test_fused_gives_the_numbers_of_torchs_fused_kernel_where_that_has_no_rest(shape):
    ours, theirs = (
        torch.nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)) for _ in "ab"
    )
    optimizer, reference = AdamW([ours], fused=True), torch.optim.AdamW([theirs], fused=True)
    for step in range(4):
        ours.grad = torch.cos(ours.detach() * (step + 1) * 30)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


def test_fp64_parameters_have_fp64_states_and_torchs_numbers():
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 40, dtype=torch.float64)) for _ in "ab")
    for optimizer, p in ((AdamW([ours]), ours), (torch.optim.AdamW([theirs], foreach=False), theirs)):
        for _ in range(3):
            p.grad = torch.sin(p.detach())
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_transposed_memory_and_gradients_in_another_order_are_fine():
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6).t()) for _ in "ab")
    grad = torch.sin(torch.arange(24.0)).view(6, 4)
    for optimizer, p in ((AdamW([ours]), ours), (torch.optim.AdamW([theirs], foreach=False), theirs)):
        for _ in range(3):
            p.grad = grad.clone() if p is ours else grad.t().contiguous().t()
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_a_gradient_that_autograd_expanded_is_fine():
    for kind in KINDS:
        params = parameters(kind)
        optimizer = make_optimizer(kind, params)
        for p in params.values():
            p.grad = torch.ones(()).expand(p.shape)
        before = params["first"].detach().clone()
        optimizer.step()
        assert not torch.equal(params["first"], before)


def test_bf16_parameters_are_worked_on_in_fp32_and_rounded_to_nearest():
    start = torch.linspace(-1, 1, 64).bfloat16()
    grad = torch.cos(torch.arange(64.0)).bfloat16()
    ours, wide = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    for optimizer, p in (
        (AdamW([ours], lr=0.1), ours),
        (torch.optim.AdamW([wide], lr=0.1, foreach=False), wide),
    ):
        p.grad = grad.to(p.dtype)
        optimizer.step()
    assert torch.equal(ours, wide.bfloat16())


@pytest.mark.parametrize("quantized", [False, True])
def test_stochastic_rounding_is_right_on_average_and_repeats(quantized):
    start = torch.full((64, 256), 1.0).bfloat16()

    def run(seed):
        p = torch.nn.Parameter(start.clone())
        options = {"lr": 1e-3, "weight_decay": 0.0, "stochastic_rounding": True, "seed": seed}
        optimizer = (AdamW8bit if quantized else AdamW)([("p", p)], **options)
        p.grad = torch.ones_like(p)
        optimizer.step()
        return p.detach().float()

    first = run(1)
    assert set(first.unique().tolist()) == {1.0, 1.0 - 2**-8}
    assert first.mean().item() == pytest.approx(1 - 1e-3, abs=1e-4)
    assert torch.equal(first, run(1))
    assert not torch.equal(first, run(2))


# ---------------------------------------------------------------- as an optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_allocated_after_the_first_step(kind, dtype):
    params = {n: torch.nn.Parameter(t.to(dtype)) for n, t in full_tensors().items()}
    options = {"stochastic_rounding": dtype == torch.bfloat16}
    optimizer = make_optimizer(kind, params, **options)
    for step in range(3):
        for name, grad in full_gradients(step).items():
            params[name].grad = grad.to(dtype)
        with Allocations() as spy:
            optimizer.step()
    assert spy.found == []


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_not_kept_alive(kind):
    params = parameters(kind)
    optimizer = make_optimizer(kind, params)
    for step in range(2):
        for name, grad in full_gradients(step).items():
            params[name].grad = grad
        optimizer.step()
    del grad
    storages = [p.grad.untyped_storage()._weak_ref() for p in params.values()]
    optimizer.zero_grad()
    gc.collect()
    expired = [torch.UntypedStorage._expired(s) for s in storages]
    for s in storages:
        torch.UntypedStorage._free_weak_ref(s)
    assert all(expired)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_closures_and_grad_scaler_work(kind):
    params = parameters(kind)
    optimizer = make_optimizer(kind, params)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    reference = parameters(kind)
    theirs = make_optimizer(kind, reference)
    for step in range(3):

        def closure(step=step):
            for name, grad in full_gradients(step).items():
                params[name].grad = grad * 4
            return torch.tensor(3.5)

        closure()
        scaler.scale(torch.ones(()))
        if step == 1:
            params["first"].grad[3, 4] = float("inf")  # found and skipped by the scaler
        scaler.step(optimizer)
        scaler.update(4.0)
        schedule.step()
        if step != 1:
            for group in theirs.param_groups:
                group["lr"] = (3e-3 if group["weight_decay"] == 0 else 1e-2) * 0.5**step
            for name, grad in full_gradients(step).items():
                reference[name].grad = grad
            theirs.step()
    assert optimizer.skipped_steps == 1
    for name, p in params.items():
        assert torch.equal(p, reference[name]), name
    assert theirs.step(lambda: torch.tensor(3.5)) == 3.5


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_pickles_and_copies_go_on_with_the_same_bits(kind):
    def advance(params, optimizer, step):
        for name, grad in full_gradients(step).items():
            params[name].grad = grad
        optimizer.step()

    params = parameters(kind)
    optimizer = make_optimizer(kind, params)
    advance(params, optimizer, 0)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    start = {n: p.detach().clone() for n, p in params.items()}
    bundle = pickle.loads(pickle.dumps((params, optimizer)))
    twin = copy.deepcopy((params, optimizer))
    fresh = {n: torch.nn.Parameter(t.clone()) for n, t in start.items()}
    loaded = make_optimizer(kind, fresh)
    loaded.load_state_dict(torch.load(saved))
    advance(params, optimizer, 1)
    for others, other in (bundle, twin, (fresh, loaded)):
        advance(others, other, 1)
        for name, p in params.items():
            assert torch.equal(p, others[name]), name


def test_states_of_torchs_adamw_load():
    theirs = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    reference = torch.optim.AdamW([theirs], foreach=False)
    theirs.grad = torch.ones(40)
    reference.step()
    ours = torch.nn.Parameter(theirs.detach().clone())
    optimizer = AdamW([ours])
    optimizer.load_state_dict(reference.state_dict())
    for p, chosen in ((ours, optimizer), (theirs, reference)):
        p.grad = torch.full((40,), 0.3)
        chosen.step()
    assert torch.equal(ours, theirs)


def test_a_state_dict_of_another_format_is_refused_and_changes_nothing():
    params = parameters("AdamW8bit elements")
    optimizer = make_optimizer("AdamW8bit elements", params)
    other = make_optimizer("AdamW8bit tile", parameters("AdamW8bit tile"))
    with pytest.raises(ValueError, match="block='tile:8x16', this optimizer has block='elements:64'"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"second: the saved state has .* this optimizer needs"):
        optimizer.load_state_dict(make_optimizer("AdamW", parameters("AdamW")).state_dict())


def test_a_group_added_later_has_its_states_at_once():
    params = parameters("AdamW8bit elements")
    optimizer = make_optimizer("AdamW8bit elements", params)
    late = torch.nn.Parameter(torch.ones(64, 64))
    optimizer.add_param_group({"params": [("late", late)], "quantize": False})
    assert optimizer.state[late].keys() == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(ValueError, match="betas"):
        optimizer.add_param_group(
            {"params": [("wrong", torch.nn.Parameter(torch.ones(3)))], "betas": (0.9, 1.0)}
        )
    assert len(optimizer.param_groups) == 3
    assert len(optimizer.state) == len(params) + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.9, 1.5)}, r"betas\[1\]=1.5"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"eps": -1e-8}, "eps"),
    ],
)
def test_options_that_do_not_apply_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW([torch.nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": Rows(3)}, "Elements"),
    ],
)
def test_8_bit_options_that_do_not_apply_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW8bit([torch.nn.Parameter(torch.ones(3))], **options)


def test_which_tensors_are_8_bit_follows_from_names_and_global_shapes_and_the_policy_agrees():
    params = parameters("AdamW8bit tile")
    optimizer = make_optimizer("AdamW8bit tile", params)
    assert {n for n, p in params.items() if "exp_avg_scale" in optimizer.state[p]} == EIGHT_BIT
    policy = AdamW8bit.block_policy(block=Tile(8, 16), min_8bit_numel=LEAST)
    assert {n: policy(n, p) for n, p in params.items()} == {
        n: Tile(8, 16) if n in EIGHT_BIT else None for n in params
    }
    assert AdamW.block_policy()("first", params["first"]) is None
    every = AdamW8bit(
        params.items(), quantize=lambda name, p: p.ndim > 0, min_8bit_numel=0, block=Elements(8)
    )
    assert all("exp_avg_scale" in every.state[p] for p in params.values() if p.ndim)


@pytest.mark.parametrize(
    ("block", "per_parameter"), [(Elements(256), 2.031), (Tile(32, 32), 2.008), (Tile(128, 128), 2.0005)]
)
def test_state_bytes_for_each_parameter(block, per_parameter):
    p = torch.nn.Parameter(torch.zeros(1024, 512))
    state = AdamW8bit([p], block=block).state[p]
    total = sum(t.numel() * t.element_size() for t in state.values()) - state["step"].element_size()
    assert total / p.numel() == pytest.approx(per_parameter, abs=6e-4)


@pytest.mark.parametrize(("new_gradients", "expected"), [(False, 0), (True, 3)])
def test_a_further_parameter_of_a_run_costs_few_python_calls(new_gradients, expected):
    def calls_of_a_step(number):
        params = [torch.nn.Parameter(p) for p in torch.randn(number * 16).split(16)]
        gradients = torch.randn(number * 16)
        optimizer = AdamW(params, fused=True)
        found = []
        for step in range(4):
            if step == 0 or new_gradients:
                for p, grad in zip(params, gradients.split(16), strict=True):
                    p.grad = grad.detach()
            if step == 3:
                sys.setprofile(lambda frame, event, argument: found.append(event))
            try:
                optimizer.step(grad_norm=1.0)
            finally:
                sys.setprofile(None)
        return found.count("call")

    assert calls_of_a_step(40) - calls_of_a_step(20) == 20 * expected


@pytest.mark.parametrize("block", [Elements(256), Tile(16, 16)])
@pytest.mark.parametrize("huge", [1e18, 1e20, 1e25, 3e38])
def test_a_gradient_too_large_for_its_square_moves_weights_by_adams_step(block, huge):
    p = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW8bit([p], lr=1e-2, block=block, min_8bit_numel=1)
    for value in (1.0, huge, 1.0, -huge, 1.0):
        p.grad = torch.ones(64, 64)
        p.grad[3, 3] = value
        optimizer.step()
        assert p.abs().max() < 0.5

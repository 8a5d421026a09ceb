"""AdamW against torch's, to the bit; memory and calls of a step, of Muon's too; states of 8 bits and their codes."""

import copy
import gc
from typing import Any

import pytest
import torch
from runs import GAP_FILL, MATRICES, STACKS, Allocations, neighbors, run_of, same, tensors

from block_optim import AdamW, AdamW8bit
from layout_planner import Elements, Tile

SHAPES = [(33, 17), (5,), (64, 64), (1,), (), (7, 3, 3), (304,)]
EVERY = ("AdamW", "AdamW fused", "AdamW8bit", "AdamW8bit tiles")
every_kind = pytest.mark.parametrize("case", EVERY)


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
    views, between = neighbors(tensors(SHAPES, 0), GAP_FILL, gap)
    grads, _ = neighbors(tensors(SHAPES, 0), torch.nan, gap)
    ours = [torch.nn.Parameter(view) for view in views]
    theirs = [torch.nn.Parameter(view.clone()) for view in views]
    optimizer = AdamW(groups(ours, lr), lr=lr, maximize=maximize)
    reference = torch.optim.AdamW(groups(theirs, lr), lr=lr, maximize=maximize, foreach=False)
    for step in range(5):
        for a, b, grad, value in zip(ours, theirs, grads, tensors(SHAPES, step + 1), strict=True):
            grad.copy_(value * 10)
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
    assert all((elements == GAP_FILL).all() and len(elements) == gap for elements in between)


def line(*shape, dtype=torch.float32):
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype).view(shape)


@pytest.mark.parametrize(
    ("start", "options"),
    [
        # torch's kernel has no rest.
        *((line(*shape), {"fused": True}) for shape in ((16, 16), (48,), (4, 3, 4))),
        (line(40, dtype=torch.float64), {}),
        (line(4, 6).t(), {}),  # also if gradients are laid out in another order
    ],
)
def test_fused_fp64_and_transposed_parameters_have_torchs_numbers(start, options):
    ours, theirs, loaded = (torch.nn.Parameter(start.clone()) for _ in range(3))
    reference = torch.optim.AdamW([theirs], **(options or {"foreach": False}))
    optimizer, third = AdamW([ours], **options), AdamW([loaded], **options)
    for step in range(4):
        grad = torch.cos(theirs.detach() * (step + 1) * 30)
        if step == 2:
            third.load_state_dict(copy.deepcopy(reference.state_dict()))
            loaded.data.copy_(theirs)
        ours.grad, theirs.grad, loaded.grad = grad.contiguous(), grad, grad.clone()
        for each in (optimizer, reference, third):
            each.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(loaded, theirs)


@every_kind
def test_a_gradient_that_autograd_expanded_is_fine(case):
    run = run_of(case)
    for p in run.params:
        p.grad = torch.ones(()).expand(p.shape)
    before = run.params[0].detach().clone()
    run.optimizer.step()
    assert not torch.equal(run.params[0], before)


@pytest.mark.parametrize(
    "case",
    [
        *(
            kind + narrow
            for kind in ("AdamW8bit", "AdamW8bit tiles")
            for narrow in ("", ", stochastic rounding")
        ),
        *("Muon", "NorMuon", "Muon buckets"),
    ],
)
def test_nothing_is_allocated_after_the_first_step(case):
    run = run_of(case, skip_nonfinite=False, **({"shapes": MATRICES + STACKS} if "uon" in case else {}))
    for step in range(3):
        run.give(step)
        with Allocations() as spy:
            run.optimizer.step()
    assert spy.found == []


@every_kind
@pytest.mark.parametrize("narrow", ["", ", stochastic rounding"])
def test_chunks_change_no_bit(case, narrow, monkeypatch):
    shapes = ((12, 20), (6, 8), (9,))  # several tiles from left to right
    expected = run_of(case + narrow, shapes=shapes).steps(0, 3).result()
    for chunk in ("core.scratch", "adam.q8.rule"):
        monkeypatch.setattr(f"block_optim.{chunk}.CPU_CHUNK", 32)
    same(run_of(case + narrow, shapes=shapes).steps(0, 3).result(), expected)


@every_kind
def test_gradients_are_not_kept_alive(case):
    run = run_of(case).steps(0, 2)
    storages = [p.grad.untyped_storage()._weak_ref() for p in run.params]
    run.optimizer.zero_grad()
    gc.collect()
    expired = [torch.UntypedStorage._expired(s) for s in storages]
    for s in storages:
        torch.UntypedStorage._free_weak_ref(s)
    assert all(expired)


def test_a_group_added_later_has_its_states_at_once():
    run = run_of("AdamW8bit")
    late = torch.nn.Parameter(torch.ones(64, 64))
    run.optimizer.add_param_group({"params": [("late", late)], "quantize": False})
    assert run.optimizer.state[late].keys() == {"step", "exp_avg", "exp_avg_sq"}
    wrong = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="betas"):
        run.optimizer.add_param_group({"params": [("wrong", wrong)], "betas": (0.9, 1.0)})
    assert len(run.optimizer.param_groups) == 2
    assert len(run.optimizer.state) == len(run.params) + 1


def test_which_tensors_are_8_bit_follows_from_names_and_global_shapes():
    shapes = {"embed.weight": (40, 16), "first": (50, 40), "norm": (700,), "scalar": (), "one": (1, 40)}
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    options: dict[str, Any] = {"block": Tile(8, 16), "min_8bit_numel": 512}
    optimizer = AdamW8bit(params.items(), **options)
    assert {n for n, p in params.items() if "exp_avg_scale" in optimizer.state[p]} == {"first"}
    policy = AdamW8bit.block_policy(**options)
    assert {n: policy(n, p) for n, p in params.items()} == {**dict.fromkeys(shapes), "first": Tile(8, 16)}
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


@pytest.mark.parametrize("block", [Elements(256), Tile(16, 16)])
@pytest.mark.parametrize("huge", [1e18, 1e20, 1e25, 3e38])
def test_a_gradient_too_large_for_its_square_moves_weights_by_adams_step(block, huge):
    p = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW8bit([p], lr=1e-2, block=block, min_8bit_numel=1)
    for value in (1.0, huge, 1.0, -huge, 1.0):
        p.grad = torch.zeros(64, 64)
        p.grad[:32], p.grad[3, 3] = 1.0, value
        optimizer.step()
        assert p.abs().max() < 0.5
        assert not p[32:].any()  # blocks of zeros
    assert all(state.isfinite().all() for state in optimizer.state[p].values())


def test_frozen_parameters_may_have_a_dtype_that_torch_does_not_promote():
    trained = torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    optimizer = AdamW([trained, frozen], lr=0.1)
    trained.grad = torch.ones(3)
    optimizer.step()
    assert (trained < 1).all()


def steps_to_one(count):
    """That many floating-point steps with 5 bits of mantissa, the last of which is 1."""
    return (((127 << 5) + torch.arange(1 - count, 1)) << 18).to(torch.int32).view(torch.float32)


def test_states_are_the_nearest_of_the_documented_codes():
    moments = steps_to_one(128) - steps_to_one(128)[0]
    roots = steps_to_one(256) - steps_to_one(257)[0]
    p = torch.nn.Parameter(torch.zeros(32, 256))
    p.grad = torch.randn(32, 256).mul(torch.logspace(-4, 0, 256)).clamp(-1, 1)
    optimizer = AdamW8bit([p], block=Elements(256))
    optimizer.step()
    state = optimizer.state[p]
    signs = 1 - 2 * (state["exp_avg"] >> 7).float()
    numbers = {"exp_avg": 0.1 * p.grad * signs, "exp_avg_sq": (0.001 * p.grad.square()).sqrt()}
    for (key, number), values, mask in zip(numbers.items(), (moments, roots), (127, 255), strict=True):
        units = number / state[f"{key}_scale"].view(32, 1)
        error = (values[state[key].int() & mask] - units).abs()
        assert (error <= (values - units[..., None]).abs().amin(-1) + 1e-6).all()
        assert units.amax(1).sub(values[-1]).abs().max() < 1e-6
    assert 0 < roots[0] < 1.3e-4
    far = roots > 0.01
    assert (roots[far].diff() / roots[far][:-1]).max() / 2 < 0.0225


@pytest.mark.parametrize("block", [Elements(256), Tile(32, 32), Tile(128, 128)], ids=str)
def test_columns_of_any_size_keep_updates_small(block):
    torch.manual_seed(0)
    scales = torch.logspace(-4, 4, 256)[torch.randperm(256)]
    p = torch.nn.Parameter(torch.zeros(256, 256))
    optimizer = AdamW8bit([p], lr=1.0, weight_decay=0.0, block=block)
    for _ in range(30):
        before = p.detach().clone()
        p.grad = torch.randn(256, 256) * scales
        optimizer.step()
        assert (p.detach() - before).abs().max() < 10


@pytest.mark.parametrize(
    ("block", "shape", "full"),
    [(Tile(32, 32), (40, 70), (64, 96)), (Elements(96), (30, 95), (31, 95))],
    ids=["tile", "elements"],
)
def test_a_short_block_is_as_if_zeros_followed(block, shape, full):
    big, small = torch.nn.Parameter(torch.zeros(full)), torch.nn.Parameter(torch.ones(shape))
    with torch.no_grad():
        big[: shape[0], : shape[1]] = 1
    optimizer = AdamW8bit([big, small], min_8bit_numel=1, block=block)
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=generator)
    # The second all but cancels the first moment: what is left elsewhere would show.
    for factor in (1.0, -0.9, 0.01):
        small.grad = first * factor
        big.grad = torch.zeros(full)
        big.grad[: shape[0], : shape[1]] = small.grad
        optimizer.step()
    assert torch.equal(small, big[: shape[0], : shape[1]])

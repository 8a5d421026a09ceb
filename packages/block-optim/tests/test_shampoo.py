"""Shampoo and KL-Shampoo in one process, against the papers' equations."""

import copy
import math
from typing import Any

import pytest
import torch
from shampoo_helpers import numbered_blocks, parameter, train
from shampoo_reference import MomentumRule, ShampooBlock, blocks_of

from block_optim import Shampoo
from block_optim.shampoo import batches, root_jobs

STEPS = 14


def gradients(shape, count=STEPS, seed=0, scale=1.0):
    """Correlated gradients, so that factors have structure."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(shape[-1], shape[-1], generator=generator) / shape[-1] ** 0.5
    return [
        scale * torch.randn(shape, generator=generator) @ (mix + 0.3 * torch.eye(shape[-1]))
        for _ in range(count)
    ]


def reference(weight, grads, max_dim, rule, stagger=False, **options):
    """The matrix after all gradients, by the plain reference; staggered by a block's number among those of its size."""
    weight = weight.double()
    blocks = [
        ShampooBlock(*shape, phase=number if stagger else None, **options)
        for shape, number in numbered_blocks(weight, max_dim)
    ]
    for grad in grads:
        direction = torch.empty_like(weight)
        for block, g, d in zip(
            blocks, blocks_of(grad.double(), max_dim), blocks_of(direction, max_dim), strict=True
        ):
            d.copy_(block.direction(g))
        weight = rule.apply(weight, direction)
    return weight


def close(found, wanted, tolerance=2e-4):
    assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("grafting", ["none", "sgd", "rmsprop", "adam"])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 1.0)])
def test_matches_the_dense_reference_for_every_grafting_and_accumulation(grafting, betas):
    grads, param = gradients((10, 7)), parameter((10, 7))
    options: dict[str, Any] = {"betas": betas, "eps": 1e-8, "grafting": grafting}
    expected = reference(
        param.detach(), grads, 4, MomentumRule(0.05), frequency=3, start=5, epsilon=1e-4, **options
    )
    optimizer = Shampoo(
        [param], lr=0.05, max_preconditioner_dim=4, precondition_frequency=3, start_preconditioning_step=5,
        stagger=False, root_epsilon=1e-4, **options,
    )  # fmt: skip
    train([param], [grads], optimizer)
    close(param.detach(), expected)


@pytest.mark.parametrize("method", ["eigh", "newton", "qr"])
def test_every_root_method_gives_the_same_run(method):
    grads, param = gradients((9, 6)), parameter((9, 6))
    expected = reference(
        param.detach(), grads, 16, MomentumRule(0.05),
        frequency=2, start=2, epsilon=1e-3, betas=(0.9, 0.9), eps=1e-8, grafting="adam",
    )  # fmt: skip
    optimizer = Shampoo(
        [param], lr=0.05, betas=(0.9, 0.9), precondition_frequency=2, stagger=False, root_method=method,
        root_epsilon=1e-3, root_tolerance=1e-3 if method == "qr" else None,
        root_iterations=60 if method != "eigh" else None,
    )  # fmt: skip
    train([param], [grads], optimizer)
    close(param.detach(), expected, 2e-3 if method == "qr" else 2e-4)


@pytest.mark.parametrize("frequency", [1, 3])
def test_kl_shampoo_matches_the_dense_reference(frequency):
    grads, param = gradients((6, 9)), parameter((6, 9))
    expected = reference(
        param.detach(), grads, 16, MomentumRule(0.02),
        frequency=frequency, start=3, epsilon=1e-3, betas=(0.9, 0.9), eps=1e-8, grafting="none", kl=True,
    )  # fmt: skip
    optimizer = Shampoo(
        [param], lr=0.02, betas=(0.9, 0.9), kl=True, precondition_frequency=frequency, stagger=False,
        start_preconditioning_step=3, root_epsilon=1e-3,
    )  # fmt: skip
    train([param], [grads], optimizer)
    close(param.detach(), expected)


@pytest.mark.parametrize("start", [3, 8])
def test_staggered_blocks_follow_the_reference_each_in_its_own_turn(start):
    grads, param = gradients((12, 8)), parameter((12, 8))
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "grafting": "rmsprop"}
    rule = {"frequency": 4, "start": start, "epsilon": 1e-4}
    expected = reference(param.detach(), grads, 4, MomentumRule(0.05), stagger=True, **rule, **options)
    together = reference(param.detach(), grads, 4, MomentumRule(0.05), **rule, **options)
    optimizer = Shampoo(
        [param], lr=0.05, max_preconditioner_dim=4, precondition_frequency=4, start_preconditioning_step=start,
        root_epsilon=1e-4, **options,
    )  # fmt: skip
    train([param], [grads], optimizer)
    close(param.detach(), expected)
    assert float((expected - together).norm()) > 1e-3  # the test would see blocks that all turn at once


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.9, 0.0, False), (0.9, 0.0, True), (0.8, 0.3, True)]
)
def test_momentum_and_weight_decay_as_in_the_reference_implementation(momentum, dampening, nesterov):
    grads, param = gradients((6, 5)), parameter((6, 5))
    rule = {"weight_decay": 0.1, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    expected = reference(
        param.detach(), grads, 8, MomentumRule(0.03, **rule),
        frequency=1, start=1, epsilon=1e-4, betas=(0.9, 0.95), eps=1e-8, grafting="adam",
    )  # fmt: skip
    optimizer = Shampoo(
        [param], lr=0.03, betas=(0.9, 0.95), precondition_frequency=1, root_epsilon=1e-4, **rule
    )
    train([param], [grads], optimizer)
    close(param.detach(), expected)


def test_the_exponent_can_be_chosen():
    grads, param = gradients((6, 5)), parameter((6, 5))
    expected = reference(
        param.detach(), grads, 8, MomentumRule(0.03),
        frequency=1, start=1, epsilon=1e-4, betas=(0.9, 0.95), eps=1e-8, grafting="none", exponent=0.5,
    )  # fmt: skip
    optimizer = Shampoo(
        [param],
        lr=0.03,
        betas=(0.9, 0.95),
        grafting="none",
        exponent=0.5,
        precondition_frequency=1,
        root_epsilon=1e-4,
    )
    train([param], [grads], optimizer)
    close(param.detach(), expected)


@pytest.mark.parametrize(
    ("shape", "matrices", "as_matrices"),
    [
        ((3, 6, 5), "auto", (3, 6, 5)),  # stacked experts
        ((6, 2, 3, 2), "auto", (1, 6, 12)),  # a convolution
        ((6, 4, 3), "flatten", (1, 6, 12)),  # a 1-D convolution
        ((2, 2, 6, 5), "stack", (4, 6, 5)),
    ],
)
def test_tensors_are_preconditioned_as_the_matrices_they_stand_for(shape, matrices, as_matrices):
    grads, param = gradients(shape), parameter(shape)
    options: dict[str, Any] = {
        "lr": 0.05,
        "precondition_frequency": 2,
        "max_preconditioner_dim": 4,
        "stagger": False,
    }
    singles = [torch.nn.Parameter(m.clone()) for m in param.detach().view(as_matrices)]
    train([param], [grads], Shampoo([param], matrices=matrices, **options))
    train(
        singles,
        [[g.view(as_matrices)[i] for g in grads] for i in range(len(singles))],
        Shampoo(singles, **options),
    )
    assert torch.equal(param.detach().view(as_matrices), torch.stack([s.detach() for s in singles]))


def test_vectors_and_single_rows_take_the_grafting_methods_step():
    shapes = [(7,), (), (1, 9), (9, 1)]
    params = [parameter(shape, seed) for seed, shape in enumerate(shapes)]
    generator = torch.Generator().manual_seed(0)
    grads = [[torch.randn(shape, generator=generator) for _ in range(6)] for shape in shapes]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    train(params, grads, Shampoo(params, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1))
    train(twins, grads, torch.optim.AdamW(twins, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1))
    for ours, adam in zip(params, twins, strict=True):
        torch.testing.assert_close(ours, adam, rtol=1e-5, atol=1e-6)


def test_without_grafting_vectors_take_the_diagonal_preconditioners_step():
    param = parameter((5,))
    grads = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected, total = param.detach().clone(), torch.zeros(5)
    for g in grads:
        total += g * g
        expected -= 0.1 * g / (total.sqrt() + 1e-8)
    train([param], [grads], Shampoo([param], lr=0.1, betas=(0.0, 1.0), grafting="none"))
    torch.testing.assert_close(param.detach(), expected)


def test_a_huge_dimension_has_a_diagonal_factor():
    grads, param = gradients((12, 5)), parameter((12, 5))
    optimizer = Shampoo(
        [param],
        lr=0.1,
        betas=(0.0, 1.0),
        grafting="none",
        diagonal_above=10,
        precondition_frequency=1,
        root_epsilon=1e-6,
    )
    state = optimizer.state[param]
    assert state["factor_rows"].numel() == state["root_rows"].numel() == 12
    assert state["factor_cols"].numel() == 15
    weight, rows, cols = param.detach().double(), torch.zeros(12).double(), torch.zeros(5, 5).double()
    for g in grads:
        g = g.double()
        rows, cols = rows + (g * g).sum(1), cols + g.mT @ g
        values, vectors = torch.linalg.eigh(cols)
        root = (vectors * (values + 1e-6 * cols.norm()).pow(-0.25)) @ vectors.mT
        weight = weight - 0.1 * (rows + 1e-6 * rows.norm()).pow(-0.25)[:, None] * g @ root
    train([param], [grads], optimizer)
    close(param.detach(), weight)


def test_roots_beside_the_step_are_used_one_step_later():
    grads, param = gradients((8, 8)), parameter((8, 8))
    twin = torch.nn.Parameter(param.detach().clone())
    options: dict[str, Any] = {
        "lr": 0.05,
        "precondition_frequency": 4,
        "max_preconditioner_dim": 4,
        "stagger": False,
    }
    beside, inline = Shampoo([param], overlap=True, **options), Shampoo([twin], **options)
    for step, grad in enumerate(grads, 1):
        param.grad, twin.grad = grad.clone(), grad.clone()
        before = {k: v.clone() for k, v in inline.state[twin].items()}
        beside.step(), inline.step()
        roots = beside.state[param]["root_rows"]
        if step in (8, 12):  # computed now, in use from the next step
            assert torch.equal(roots, before["root_rows"])
            assert not torch.equal(roots, inline.state[twin]["root_rows"])
            assert torch.equal(beside.state_dict()["state"][0]["root_rows"], inline.state[twin]["root_rows"])
        else:
            assert torch.equal(roots, inline.state[twin]["root_rows"])


def adversaries(shape):
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(shape, generator=generator)
    thin = torch.randn(shape[0], 1, generator=generator) @ torch.randn(1, shape[1], generator=generator)
    return {
        "zero": torch.zeros(shape),
        "rank one": thin,
        "huge": 1e14 * normal,
        "beyond": 1e30 * normal,
        "tiny": 1e-14 * normal,
        "below": 1e-30 * normal,
        "mixed": normal * torch.logspace(-20, 13, shape[1]),
    }


@pytest.mark.parametrize("name", list(adversaries((2, 2))))
@pytest.mark.parametrize(
    "options", [{}, {"grafting": "none"}, {"kl": True}, {"root_method": "newton"}, {"root_method": "qr"}]
)
def test_updates_stay_finite_whatever_the_gradient(name, options):
    param = parameter((9, 6))
    optimizer = Shampoo([param], lr=1e-3, max_preconditioner_dim=4, precondition_frequency=2, **options)
    bad = adversaries((9, 6))[name]
    train([param], [gradients((9, 6), 3) + [bad] * 4 + gradients((9, 6), 4, seed=2)], optimizer)
    assert bool(param.isfinite().all())
    for key, value in optimizer.state[param].items():
        assert bool(value.isfinite().all()), key
    assert optimizer.clamped_gradients == (4 if name == "beyond" else 0)
    assert optimizer.root_counts.computed > 0
    assert optimizer.root_counts.kept == 0


def test_zero_gradients_from_the_start_are_counted_and_move_nothing():
    param = parameter((4, 4))
    before = param.detach().clone()
    optimizer = Shampoo([param], precondition_frequency=1)
    train([param], [[torch.zeros(4, 4)] * 3], optimizer)
    assert torch.equal(param.detach(), before)
    assert optimizer.root_counts.zero == 6


def test_a_root_that_fails_keeps_the_last_good_one_and_says_so(caplog):
    param = parameter((4, 4))
    optimizer = Shampoo([param], lr=0.1, precondition_frequency=1, betas=(0.9, 0.9))
    train([param], [gradients((4, 4), 3)], optimizer)
    good = optimizer.state[param]["root_rows"].clone()
    optimizer.state[param]["factor_rows"][0] = math.nan
    train([param], [gradients((4, 4), 2)], optimizer)
    assert torch.equal(optimizer.state[param]["root_rows"], good)
    assert optimizer.root_counts.kept == 2
    assert bool(param.isfinite().all())
    assert "last good ones stay in use (parameter 0" in caplog.text


def test_a_gradient_that_is_not_finite_skips_the_step():
    param = parameter((6, 4))
    optimizer = Shampoo([param], precondition_frequency=1)
    train([param], [gradients((6, 4), 2)], optimizer)
    before = {k: v.clone() for k, v in optimizer.state[param].items()} | {"weight": param.detach().clone()}
    param.grad = torch.full((6, 4), math.nan)
    optimizer.step()
    after = optimizer.state[param] | {"weight": param.detach()}
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert optimizer.skipped_steps == 1


def test_a_parameter_without_gradient_stays_with_its_state():
    params = [parameter((6, 4)), parameter((6, 4), 8)]
    optimizer = Shampoo(params, precondition_frequency=1)
    grads = gradients((6, 4), 4)
    train(params, [grads, [grads[0], None, None, None]], optimizer)
    assert [int(optimizer.state[p]["step"]) for p in params] == [4, 1]
    alone = parameter((6, 4), 8)
    train([alone], [grads[:1]], Shampoo([alone], precondition_frequency=1))
    assert torch.equal(params[1].detach(), alone.detach())


@pytest.mark.parametrize("packed", [True, False])
def test_memory_is_what_the_formula_says(packed):
    shape, dim = (10, 7), 4
    param = parameter(shape)
    optimizer = Shampoo([param], max_preconditioner_dim=dim, packed=packed, momentum=0.9, root_method="qr")
    sizes = [(r, c) for r in (4, 4, 2) for c in (4, 3)]
    square = (lambda d: d * (d + 1) // 2) if packed else (lambda d: d * d)
    rows, cols = sum(square(r) for r, _ in sizes), sum(square(c) for _, c in sizes)
    assert optimizer.state_bytes() == {
        "step": 4,
        "exp_avg": 280, "exp_avg_sq": 280, "momentum_buffer": 280,
        "factor_rows": 4 * rows, "root_rows": 4 * rows, "basis_rows": 4 * sum(r * r for r, _ in sizes),
        "factor_cols": 4 * cols, "root_cols": 4 * cols, "basis_cols": 4 * sum(c * c for _, c in sizes),
    }  # fmt: skip


def test_packing_changes_no_bit():
    grads, results = gradients((9, 6)), []
    for packed in (True, False):
        param = parameter((9, 6))
        train(
            [param],
            [grads],
            Shampoo([param], packed=packed, precondition_frequency=2, max_preconditioner_dim=4),
        )
        results.append(param.detach())
    assert torch.equal(*results)


def test_factors_may_be_kept_in_bfloat16():
    grads, param, twin = gradients((16, 8)), parameter((16, 8)), parameter((16, 8))
    options: dict[str, Any] = {
        "lr": 0.05,
        "betas": (0.9, 0.9),
        "precondition_frequency": 2,
        "root_epsilon": 1e-3,
    }
    optimizer = Shampoo([param], factor_dtype=torch.bfloat16, **options)
    assert optimizer.state[param]["factor_rows"].dtype == torch.bfloat16
    train([param], [grads], optimizer)
    train([twin], [grads], Shampoo([twin], **options))
    close(param.detach(), twin.detach().double(), 0.02)


def test_bfloat16_parameters_are_updated_in_fp32():
    grads = gradients((8, 8))
    param = torch.nn.Parameter(parameter((8, 8)).detach().bfloat16())
    optimizer = Shampoo([param], lr=0.05, precondition_frequency=2, momentum=0.9, weight_decay=0.1)
    assert all(v.dtype == torch.float32 for v in optimizer.state[param].values())
    before = param.detach().clone()
    train([param], [[g.bfloat16() for g in grads]], optimizer)
    assert param.dtype == torch.bfloat16
    assert not torch.equal(param.detach(), before)


def test_a_tensor_lr_and_a_scheduler_are_obeyed():
    grads, params = gradients((6, 4), 4), [parameter((6, 4)) for _ in range(3)]
    rates: list[Any] = [0.1, torch.tensor(0.1), 0.1]
    for param, lr in zip(params, rates, strict=True):
        optimizer = Shampoo([param], lr=lr, precondition_frequency=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.0 if param is params[2] else 1.0)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(params[0], params[1])
    halfway = parameter((6, 4))
    train([halfway], [grads[:2]], Shampoo([halfway], lr=0.1, precondition_frequency=2))
    assert torch.equal(params[2].detach(), halfway.detach())


def test_groups_have_options_of_their_own():
    grads, params = gradients((6, 4)), [parameter((6, 4)), parameter((6, 4))]
    groups: list[dict[str, Any]] = [
        {"params": [params[0]], "kl": True},
        {"params": [params[1]], "grafting": "sgd", "max_preconditioner_dim": 3},
    ]
    train(params, [grads, grads], Shampoo([dict(g) for g in groups], lr=0.01, precondition_frequency=2))
    singles = [parameter((6, 4)), parameter((6, 4))]
    for param, group in zip(singles, groups, strict=True):
        options = {k: v for k, v in group.items() if k != "params"}
        train([param], [grads], Shampoo([param], lr=0.01, precondition_frequency=2, **options))
    assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(params, singles, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_continues_with_the_same_bits_from_a_state_dict(overlap):
    grads, param = gradients((9, 6)), parameter((9, 6))
    options: dict[str, Any] = {
        "precondition_frequency": 3,
        "max_preconditioner_dim": 4,
        "momentum": 0.9,
        "overlap": overlap,
    }
    optimizer = Shampoo([param], **options)
    train([param], [grads[:8]], optimizer)
    again = torch.nn.Parameter(param.detach().clone())
    resumed = Shampoo([again], **options)
    # Something to be overwritten, and perhaps under way.
    train([again], [gradients((9, 6), 5, seed=9)], resumed)
    again.data.copy_(param.detach())
    resumed.load_state_dict(optimizer.state_dict())
    train([param], [grads[8:]], optimizer)
    train([again], [grads[8:]], resumed)
    assert torch.equal(param.detach(), again.detach())


def test_a_deep_copy_goes_on_alike_even_while_roots_are_under_way():
    grads = gradients((9, 6), 12)
    model = torch.nn.Module()
    model.register_parameter("weight", parameter((9, 6)))
    options: dict[str, Any] = {
        "precondition_frequency": 3,
        "max_preconditioner_dim": 4,
        "stagger": False,
        "overlap": True,
    }
    optimizer = Shampoo(model.parameters(), **options)
    train(model.parameters(), [grads[:6]], optimizer)  # the sixth step has set roots going
    twin, other = copy.deepcopy((model, optimizer))
    train(model.parameters(), [grads[6:]], optimizer)
    train(twin.parameters(), [grads[6:]], other)
    assert torch.equal(*model.parameters(), *twin.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grafting": "lamb"}, "grafting='lamb'"),
        ({"grafting": "sgd", "grafting_beta2": 0.9}, "no meaning for grafting='sgd'"),
        ({"nesterov": True}, "set momentum"),
        ({"kl": True, "exponent": 0.25}, "leave it None"),
        ({"root_method": "newton", "exponent": 0.3}, "integer order"),
        ({"root_method": "svd"}, "svd"),
        ({"max_preconditioner_dim": 1}, "use AdamW"),
        ({"precondition_frequency": 0}, "precondition_frequency=0"),
        ({"start_preconditioning_step": 0}, "start_preconditioning_step=0"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"factor_dtype": torch.float16}, "factor_dtype='float16'"),
        ({"matrices": "rows"}, "matrices='rows'"),
        ({"lr": -1.0}, "lr="),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Shampoo([parameter((4, 4))], **options)


def test_memory_that_is_not_row_major_is_refused_by_name():
    param = torch.nn.Parameter(torch.zeros(4, 6).t())
    with pytest.raises(ValueError, match=r"head: its memory is not row-major"):
        Shampoo([("head", param)])


@pytest.mark.parametrize("options", [{}, {"root_method": "qr"}, {"kl": True, "root_method": "newton"}])
def test_batches_that_are_filled_up_as_on_cuda_change_no_bit_and_no_count(options, monkeypatch):
    results = []
    for filled in (False, True):
        if filled:
            for module in (batches, root_jobs):
                monkeypatch.setattr(module, "capacity", lambda count, size, device: size)
        param = parameter((9, 6))
        optimizer = Shampoo(
            [param], max_preconditioner_dim=4, precondition_frequency=2, diagonal_above=8, **options
        )
        train([param], [[torch.zeros(9, 6), *gradients((9, 6), 6)]], optimizer)
        results.append((param.detach(), optimizer.root_counts))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]

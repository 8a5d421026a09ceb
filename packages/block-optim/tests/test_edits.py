"""What users do to groups, states and frozen parameters: done as torch's optimizers do it, or refused by name."""

import copy
import pickle

import numpy as np
import pytest
import torch
from runs import CASES, KINDS, every_kind, run_of, same, tensors

from block_optim import AdamW, AdamW8bit, Mixed
from layout_planner import Elements, Tile


def rebuild(run, case, **options):
    """Give a run another optimizer, as it is built after the parameters were changed."""
    kind, own = KINDS[case]
    run.optimizer = kind(list(run.module.named_parameters()), **{"lr": 0.1, **own, **options})
    return run


def frozen(case):
    """A run whose second parameter does not train."""
    run = run_of(case)
    run.params[1].requires_grad_(False)
    return rebuild(run, case)


@every_kind
def test_a_frozen_parameter_has_no_state_and_begins_like_one_without_gradients(case):
    run, idle = frozen(case), run_of(case)
    for step in range(2):
        for some in (run, idle):
            some.step(step, without=(1,))
    before = sum(run.optimizer.state_bytes().values())
    assert run.params[1] not in run.optimizer.state
    assert set(run.optimizer.state_dict()["state"]) == {0, 2}
    run.params[1].requires_grad_(True)
    same(run.steps(2, 6).result(), idle.steps(2, 6).result())
    assert set(run.optimizer.state_dict()["state"]) == {0, 1, 2}
    assert sum(run.optimizer.state_bytes().values()) > before


@every_kind
def test_state_dicts_lack_frozen_parameters_and_bring_states_to_those_that_have_some(case):
    trained, fresh = run_of(case).steps(0, 3), frozen(case)
    assert fresh.params[1] not in fresh.optimizer.state
    fresh.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
    fresh.module.load_state_dict(trained.module.state_dict())
    same(fresh.result(), trained.result())
    fresh.params[1].requires_grad_(True)
    same(fresh.steps(3, 6).result(), trained.steps(3, 6).result())


def test_a_tensor_without_requires_grad_but_with_a_gradient_is_updated():
    ours, theirs = torch.ones(4), torch.ones(4)
    for p, optimizer in ((ours, AdamW([ours])), (theirs, torch.optim.AdamW([theirs], foreach=False))):
        p.grad = torch.full((4,), 0.5)
        optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("case", "how"),
    [
        *((case, "state.clear()") for case in CASES),
        *(
            (case, how)
            for case in ("AdamW", "Mixed")
            for how in ("del state[p]", "state[p] = {}", "state = {}")
        ),
    ],
)
def test_a_removed_state_begins_again(case, how):
    run, fresh = run_of(case).steps(0, 2), run_of(case)
    fresh.module.load_state_dict(run.module.state_dict())
    for p in run.params:
        if how == "del state[p]":
            del run.optimizer.state[p]
        elif how == "state[p] = {}":
            run.optimizer.state[p] = {}
    if how == "state.clear()":
        run.optimizer.state.clear()
    elif how == "state = {}":
        run.optimizer.state = {}
    same(run.steps(2, 5).result(), fresh.steps(2, 5).result())


@every_kind
def test_states_that_are_assigned_are_used(case):
    run, donor = run_of(case).steps(0, 2), run_of(case).steps(0, 4)
    run.module.load_state_dict(donor.module.state_dict())
    for i, (mine, theirs) in enumerate(zip(run.params, donor.params, strict=True)):
        state = copy.deepcopy(donor.optimizer.state[theirs])
        if i:
            run.optimizer.state[mine] = state
        else:
            for key in state:
                run.optimizer.state[mine][key] = state[key]
    same(run.steps(4, 7).result(), donor.steps(4, 7).result())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.pop("exp_avg"), "p0: its state has no 'exp_avg' any more"),
        (lambda state: state.update(exp_avg=torch.zeros(3)), r"p0: state 'exp_avg' has shape \(3,\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_until_it_is_put_back_or_removed(edit, message):
    run = run_of("AdamW").steps(0, 1)
    kept = run.optimizer.state[run.params[0]]["exp_avg"].clone()
    edit(run.optimizer.state[run.params[0]])
    before = [p.detach().clone() for p in run.params]
    run.give(1)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.params, strict=True))
    own = run.optimizer.state[run.params[0]]
    own.pop("exp_avg", None)
    own["exp_avg"] = kept
    same(run.steps(1, 3).result(), run_of("AdamW").steps(0, 3).result())
    edit(own)
    del run.optimizer.state[run.params[0]]
    run.step(3)
    assert run.optimizer.state[run.params[0]]["step"] == 1


@every_kind
def test_a_parameter_taken_out_of_its_group_rests_until_it_is_put_back(case):
    run, twin = run_of(case).steps(0, 2), run_of(case).steps(0, 2)
    group = next(g for g in run.optimizer.param_groups if any(p is run.params[1] for p in g["params"]))
    index = next(i for i, p in enumerate(group["params"]) if p is run.params[1])
    group["params"].pop(index)
    before = run.params[1].detach().clone()
    run.steps(2, 4)
    assert torch.equal(before, run.params[1])
    assert len(run.optimizer.state_dict()["state"]) == 2
    for step in range(2, 4):
        twin.step(step, without=(1,))
    if case == "AdamW":
        group["params"].insert(index, run.params[1])
        same(run.steps(4, 6).result(), twin.steps(4, 6).result())
    else:
        for a, b in zip(run.params, twin.params, strict=True):
            assert torch.equal(a, b)


def test_a_parameter_may_be_replaced_and_keep_its_state_as_when_points_are_pruned():
    def trained(kind):
        p = torch.nn.Parameter(torch.linspace(0, 1, 24).view(12, 2))
        optimizer = kind([{"params": [p], "name": "points"}], lr=0.1)
        for step in range(4):
            if step == 2:
                stored = optimizer.state[p]
                stored["exp_avg"], stored["exp_avg_sq"] = stored["exp_avg"][::2], stored["exp_avg_sq"][::2]
                del optimizer.state[p]
                p = torch.nn.Parameter(p.detach()[::2].clone())
                optimizer.param_groups[0]["params"][0] = p
                optimizer.state[p] = stored
            p.grad = torch.ones_like(p) * (step - 1.5)
            optimizer.step()
        return p.detach()

    assert torch.equal(trained(AdamW), trained(lambda *a, **o: torch.optim.AdamW(*a, foreach=False, **o)))


def test_a_parameter_put_back_into_another_8_bit_group_takes_its_options():
    def put_back(**options):
        (p, q), twin = (torch.nn.Parameter(t) for t in tensors(((64, 64),) * 2, 0)), None
        optimizer = AdamW8bit([p, q], block=Elements(64))
        optimizer.param_groups[0]["params"].pop(0)
        q.grad = torch.ones_like(q)
        optimizer.step()
        kept, twin = optimizer.state.pop(p), torch.nn.Parameter(p.detach().clone())
        optimizer.add_param_group({"params": [p], **options})
        expected = AdamW8bit([{"params": [twin], **options}])
        p.grad = twin.grad = torch.randn(64, 64)
        optimizer.step()
        expected.step()
        assert torch.equal(p, twin)
        same(optimizer.state[p], expected.state[twin])
        return optimizer, p, kept

    put_back(block=Tile(16, 16))
    optimizer, p, codes = put_back(quantize=False)
    optimizer.state[p] = codes
    with pytest.raises(ValueError, match=r"'exp_avg' is torch\.uint8, expected torch\.float32"):
        optimizer.step()


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("AdamW", {"stochastic_rounding": True, "betas": (0.5, 0.6)}),
        ("AdamW8bit", {"maximize": True, "betas": (0.5, 0.6)}),
        ("Muon", {"ns_coefficients": "quintic", "momentum": 0.5, "nesterov": False}),
        ("Muon", {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "adjust_lr_fn": "spectral_unclamped"}),
        ("Shampoo", {"precondition_frequency": 3, "weight_decay": 0.3}),
        ("SOAP", {"shampoo_beta": 0.5}),
    ],
)
def test_options_that_are_edited_hold_from_the_next_step_on(case, options):
    run, unedited = run_of(case).steps(0, 1), run_of(case).steps(0, 4)
    twin = rebuild(run_of(case), case, **options)
    twin.module.load_state_dict(run.module.state_dict())
    saved = run.optimizer.state_dict()["state"]
    twin.optimizer.load_state_dict({**twin.optimizer.state_dict(), "state": saved})
    run.optimizer.param_groups[0].update(options)
    same(run.steps(1, 4).result(), twin.steps(1, 4).result())
    assert not any(torch.equal(a, b) for a, b in zip(run.params, unedited.params, strict=True))


@pytest.mark.parametrize(
    ("case", "lr"),
    [
        *(("AdamW", lr) for lr in (np.float32(0.25), np.float64(0.25), np.int64(1))),
        *((case, torch.tensor(0.25)) for case in CASES),
        *((case, torch.tensor([0.25])) for case in ("AdamW", "AdamW fused", "AdamW8bit", "Mixed")),
    ],
)
def test_numpy_numbers_and_tensors_of_one_element_are_learning_rates(case, lr):
    run, twin = rebuild(run_of(case), case, lr=lr), rebuild(run_of(case), case, lr=float(lr))
    for step in range(3):
        if step == 2 and isinstance(lr, torch.Tensor):
            lr.fill_(0.5)
            for group in twin.optimizer.param_groups:
                group["lr"] = 0.5
        run.step(step)
        twin.step(step)
    for a, b in zip(run.params, twin.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_kind
def test_it_is_pickled_and_copied_after_all_of_this(case):
    run = run_of(case).steps(0, 3)
    run.params[2].requires_grad_(False)
    torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    run.optimizer.state[run.params[0]]["note"] = 3
    for copied in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert copied.optimizer.state[copied.params[0]]["note"] == 3
        del copied.optimizer.state[copied.params[0]]["note"]
        twin = run_of(case).steps(0, 3)
        for some in (copied, twin):
            some.steps(3, 6)
        same(copied.result(), twin.result())


@pytest.mark.parametrize("kind", [AdamW8bit, Mixed])
def test_a_copy_of_8_bit_adamw_keeps_which_tensors_are_8_bit(kind):
    p, q = (torch.nn.Parameter(t) for t in tensors(((8, 8), (64,)), 0))
    more = {"block": Elements(8), **({"algorithm": "adamw8bit"} if kind is Mixed else {})}
    optimizer = kind([{"params": [p], "quantize": False, **more}, {"params": [q], "quantize": True, **more}])
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    _, copied = copy.deepcopy(((p, q), optimizer))
    assert [state["exp_avg"].dtype for state in copied.state.values()] == [torch.float32, torch.uint8]
    for own, other in zip(optimizer.state.values(), copied.state.values(), strict=True):
        same(other, own)


def test_muon_follows_a_model_that_is_cast_to_bf16():
    run = run_of("Muon").steps(0, 1)
    run.dtype = torch.bfloat16
    for param in run.params:
        param.data = param.data.bfloat16()
    before = [p.detach().clone() for p in run.params]
    run.steps(1, 3)
    assert all(run.optimizer.state[p]["momentum_buffer"].dtype == torch.float32 for p in run.params)
    assert not any(torch.equal(p, old) for p, old in zip(run.params, before, strict=True))

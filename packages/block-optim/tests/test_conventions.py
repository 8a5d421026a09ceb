"""What programs written for torch's optimizers do to an optimizer: every kind answers as torch's, or in words."""

import copy
import functools
import inspect
import itertools
from typing import Any

import pytest
import torch
from runs import SHAPES, every_kind, make, run_of, same, tensors

from block_optim import AdamW, AdamW8bit, Mixed, Muon
from block_optim.adam import adamw8bit
from block_optim.routing.mixed import ALGORITHMS

schedulers = torch.optim.lr_scheduler


def parameter(shape=(6, 4), seed=0):
    return torch.nn.Parameter(tensors([shape], seed)[0])


def test_muon_takes_torchs_arguments_in_torchs_order_with_torchs_defaults():
    ours, theirs = (inspect.signature(kind).parameters for kind in (Muon, torch.optim.Muon))
    assert list(ours)[: len(theirs)] == list(theirs)
    for name in ("lr", "weight_decay", "momentum", "nesterov", "eps", "adjust_lr_fn"):
        assert ours[name].default == theirs[name].default


def test_a_state_dict_of_torchs_muon_is_taken_with_its_options():
    ours, theirs = parameter((8, 12)), parameter((8, 12))
    reference = torch.optim.Muon(
        [theirs], lr=0.05, ns_coefficients=(3.0, -4.0, 1.9), ns_steps=3, momentum=0.8
    )
    theirs.grad = tensors([theirs.shape], 1)[0]
    reference.step()
    optimizer = Muon([ours])
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["ns_coefficients"] == (3.0, -4.0, 1.9)
    ours.data.copy_(theirs)
    for p, chosen in ((ours, optimizer), (theirs, reference)):
        p.grad = tensors([p.shape], 2)[0]
        chosen.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


def test_a_state_dict_of_sgd_is_refused_by_muon_and_loads_as_the_error_says():
    ours, theirs = parameter(), parameter()
    reference, optimizer = torch.optim.SGD([theirs], lr=0.5, momentum=0.9), Muon([ours])
    for _ in range(3):
        theirs.grad = torch.ones_like(theirs)
        reference.step()
    saved, own = reference.state_dict(), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"param_groups\[0\] of the state dict: dampening=0"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == own["param_groups"]
    averages = {"momentum_buffer": saved["state"][0]["momentum_buffer"] * (1 - 0.9)}
    optimizer.load_state_dict({"state": {0: averages}, "param_groups": own["param_groups"]})
    torch.testing.assert_close(optimizer.state[ours]["momentum_buffer"], averages["momentum_buffer"])


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
def test_arguments_of_torchs_adamw_that_ask_for_nothing_else_are_taken(kind):
    theirs = inspect.signature(torch.optim.AdamW).parameters
    assert list(inspect.signature(kind).parameters)[:6] == list(theirs)[:6]
    defaults = {name: option.default for name, option in theirs.items() if name != "params"}
    for options in (defaults, {**defaults, "foreach": True}, {**defaults, "fused": False, "maximize": None}):
        p, plain = parameter(), parameter()
        p.grad = plain.grad = torch.ones_like(p)
        kind([p], **options).step()
        kind([plain]).step()
        assert torch.equal(p, plain)


def test_a_group_of_mixed_keeps_a_key_of_the_callers_own():
    optimizer = Mixed([{"params": [parameter()], "algorithm": "muon", "lr_scale": 0.5}])
    optimizer.add_param_group({"params": [parameter()], "algorithm": "adamw", "lr_scale": 2.0})
    assert [group["lr_scale"] for group in optimizer.state_dict()["param_groups"]] == [0.5, 2.0]


def test_a_refused_state_dict_changes_nothing():
    run, other = run_of("AdamW").steps(0, 1), run_of("AdamW").steps(0, 2)
    before, saved = copy.deepcopy(run.optimizer.state_dict()), other.optimizer.state_dict()
    with pytest.raises(ValueError, match="betas"):
        run.optimizer.load_state_dict(
            {**saved, "param_groups": [{**saved["param_groups"][0], "betas": (0.9, 1.5)}]}
        )
    after = run.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        same(after["state"][key], state)


def test_a_parameter_that_is_given_twice_is_warned_of():
    with pytest.warns(UserWarning, match="duplicate parameters"):
        AdamW([p := parameter(), p])


def test_what_applies_of_torchs_state_dict_is_taken_and_what_it_does_not_know_stays():
    ways: tuple[dict[str, Any], ...] = ({"foreach": True}, {"fused": True}, {"fused": False})
    q = parameter()
    q.grad = torch.ones_like(q)
    for saved, fused in itertools.product(ways, (False, True)):
        reference = torch.optim.AdamW([q], lr=0.02, betas=(0.5, 0.6), maximize=True, **saved)
        schedulers.OneCycleLR(reference, 1.0, 10)  # notes of its own in the groups
        reference.step()
        optimizer = AdamW([parameter()], fused=fused)
        optimizer.load_state_dict(reference.state_dict())
        betas = reference.param_groups[0]["betas"]
        (group,) = optimizer.param_groups
        chosen = {"betas": betas, "maximize": True, "fused": fused, "max_lr": 1.0}
        assert chosen.items() <= group.items()
        assert "foreach" not in group
        found, expected = (o.state_dict()["state"][0]["exp_avg"] for o in (optimizer, reference))
        assert found.equal(expected)


@every_kind
def test_its_own_state_dict_without_some_options_keeps_the_optimizers(case):
    run, other = run_of(case).steps(0, 1), run_of(case)
    saved = run.optimizer.state_dict()
    del saved["param_groups"][-1]["weight_decay"]
    other.optimizer.param_groups[-1]["weight_decay"] = 0.7
    other.optimizer.load_state_dict(saved)
    assert other.optimizer.param_groups[-1]["weight_decay"] == 0.7


@pytest.mark.parametrize("case", ["AdamW", "Muon", "Shampoo", "Mixed"])
def test_hooks_of_steps_and_state_dicts_are_called(case):
    run, calls = run_of(case), []
    o = run.optimizer
    o.register_step_pre_hook(lambda *_: calls.append("before step"))
    o.register_step_post_hook(lambda *_: calls.append("after step"))
    o.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
    o.register_state_dict_post_hook(lambda _, saved: {**saved, "mine": 1})
    o.register_load_state_dict_pre_hook(lambda _, saved: calls.append("before loading"))
    o.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))
    run.step(0)
    saved = o.state_dict()
    assert saved["mine"] == 1
    o.load_state_dict(saved)
    assert calls == ["before step", "after step", "before saving", "before loading", "after loading"]


CYCLES: dict[str, Any] = {
    "one cycle": functools.partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=6),
    "cyclic": functools.partial(
        schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2, base_momentum=0.7
    ),
}


@pytest.mark.parametrize("kinds", [("muon", "adamw"), ("adamw", "soap", "adamw8bit"), ("shampoo", "muon")])
@pytest.mark.parametrize("cycle", CYCLES)
def test_schedulers_cycle_momentum_of_mixed_as_of_each_algorithm(cycle, kinds):
    mixed = Mixed([{"params": [(name, parameter())], "algorithm": name} for name in kinds], lr=0.1)
    algorithms: Any = ALGORITHMS
    alone = [algorithms[name]([(name, parameter())], lr=0.1) for name in kinds]
    seen = []
    running = [CYCLES[cycle](optimizer) for optimizer in (mixed, *alone)]
    for step in range(5):
        if step == 3:  # a copy keeps them
            mixed = copy.deepcopy(mixed)
            running[0].optimizer = mixed
        for group in (g for optimizer in (mixed, *alone) for g in optimizer.param_groups):
            group["params"][0].grad = tensors([(6, 4)], step)[0]
        for optimizer in (mixed, *alone):
            optimizer.step()
        for own, optimizer in zip(mixed.param_groups, alone, strict=True):
            (theirs,) = optimizer.param_groups
            assert own["params"][0].equal(theirs["params"][0])
            for key in ("lr", "betas", "momentum"):
                assert own.get(key) == theirs.get(key)
        seen.append([(group.get("betas"), group.get("momentum")) for group in mixed.param_groups])
        for scheduler in running:
            scheduler.step()
    assert all(len(set(moved)) > 1 for moved in zip(*seen, strict=True))


@every_kind
def test_closures_zero_grad_and_steps_without_gradients(case):
    run = run_of(case)
    before = [p.detach().clone() for p in run.params]
    run.optimizer.zero_grad()
    assert run.optimizer.step(lambda: torch.tensor(2.5)) == 2.5
    assert all(torch.equal(a, b) for a, b in zip(before, run.params, strict=True))

    calls = []

    def closure():
        calls.append(1)
        assert torch.is_grad_enabled()
        run.optimizer.zero_grad()
        loss = sum((p**2).sum() for p in run.params)
        loss.backward()
        return loss

    losses = [run.optimizer.step(closure).item() for _ in range(6)]
    assert len(calls) == 6
    assert losses[-1] < losses[0]
    run.optimizer.zero_grad(set_to_none=False)
    assert all(p.grad.abs().sum() == 0 for p in run.params)


@every_kind
def test_torchs_default_dtype_changes_nothing(case):
    def trained(default):
        params = [torch.nn.Parameter(t) for t in tensors(SHAPES, 0)]
        grads = [tensors(SHAPES, step) for step in (1, 2, 3)]
        torch.set_default_dtype(default)
        try:
            optimizer = make(case, [(f"p{i}", p) for i, p in enumerate(params)])
            for step in grads:
                for param, grad in zip(params, step, strict=True):
                    param.grad = grad
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        return params, optimizer.state_dict()["state"]

    torch.testing.assert_close(trained(torch.float64), trained(torch.float32), rtol=0, atol=0)


@every_kind
def test_grad_scaler_unscales_and_its_infinities_skip_the_step(case):
    run, twin = run_of(case), run_of(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in range(3):
        run.give(step)
        for p in run.params:
            p.grad.mul_(scaler.get_scale())
        if step == 1:
            run.params[0].grad[0, 0] = float("inf")
        else:
            twin.step(step)
        scaler.step(run.optimizer)
        scaler.update()
    assert run.optimizer.skipped_steps == 1
    same(run.result(), twin.result())


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_grad_scaler_divides_narrow_gradients_in_fp32(case, dtype):
    run, twin = run_of(case, dtype=dtype), run_of(case, dtype=dtype)
    for p in twin.params:
        p.grad_dtype = torch.float32
    for step in range(3):
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        scaler.scale(torch.ones(()))
        run.give(step)
        for p, other in zip(run.params, twin.params, strict=True):
            p.grad.mul_(1e-3)  # over the scale, less than the smallest number of fp16
            other.grad = p.grad.float() / 65536
        scaler.step(run.optimizer)
        twin.optimizer.step()
        for p, other in zip(run.params, twin.params, strict=True):
            assert torch.equal(p.grad, other.grad.to(dtype))
    same(run.result(), twin.result())


def test_8_bit_states_of_parameters_without_names_are_told_once(caplog):
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(80, 64), "fc": torch.nn.Linear(64, 80)})
    adamw8bit._log_unnamed.cache_clear()
    AdamW8bit(model.named_parameters())
    AdamW8bit(model.parameters(), quantize=lambda name, param: True)
    assert caplog.messages == []
    for _ in range(2):
        AdamW8bit(model.parameters())
    (told,) = caplog.messages
    assert "named_parameters()" in told


def test_a_run_of_named_groups_keeps_its_names():
    run = run_of("AdamW", shapes=((3, 4), (5,)))
    assert run.optimizer.param_groups[0]["param_names"] == ["p0", "p1"]
    saved = run.optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["p0", "p1"]
    run.optimizer.param_groups[0]["params"].pop(0)
    run.optimizer.step()
    assert run.optimizer.param_groups[0]["param_names"] == ["p1"]

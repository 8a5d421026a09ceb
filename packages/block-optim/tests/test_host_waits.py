"""On a device no step waits for it, with the bits of the CPU, also where a step is skipped."""

from typing import Any

import pytest
import torch
from runs import Run, same

from block_optim import SOAP, AdamW, AdamW8bit, Mixed, Muon, Shampoo, local_of
from block_optim.core import device as devices
from layout_planner import Elements
from ragged_shard.testing import OnItsWay, host_waits, on_ranks

pytestmark = pytest.mark.gpu_guard

SHAPES = ((8, 6), (6, 8), (12, 4), (7,))
LONG = ((4, 32), (40, 4), (4, 32))  # where the Gram form saves FLOPs
SMALL: dict[str, Any] = {"max_preconditioner_dim": 4, "precondition_frequency": 2, "stagger": True}


def mixed(named, **options):
    kinds = [
        ("muon", {}),
        ("soap", {**SMALL, "overlap": True}),
        ("adamw", {"fused": False}),
        ("adamw", {"fused": False}),
    ]
    groups = [{"params": [pair], "algorithm": k, **o} for pair, (k, o) in zip(named, kinds, strict=True)]
    return Mixed(groups, **options)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "AdamW fused": (AdamW, {"fused": True}),
    "AdamW bf16": (AdamW, {"stochastic_rounding": True}),
    "AdamW8bit": (AdamW8bit, {"min_8bit_numel": 1, "block": Elements(8)}),
    "Muon": (Muon, {"weight_decay": 0.2}),
    "Muon gram": (Muon, {"method": "gram", "matrices": "flatten"}),
    "NorMuon": (Muon, {"normuon": True, "momentum_dtype": torch.bfloat16, "cautious_weight_decay": True}),
    "Shampoo": (Shampoo, {**SMALL, "overlap": True, "momentum": 0.9}),
    "Shampoo, betas": (Shampoo, {**SMALL, "overlap": True, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    "SOAP": (SOAP, {**SMALL, "overlap": True}),
    "Mixed": (mixed, {}),
}
every_kind = pytest.mark.parametrize("case", KINDS)


def run_of(case, layout="plain"):
    kind, options = KINDS[case]
    matrices = LONG if "gram" in case else SHAPES[:3] if "uon" in case else SHAPES
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    return Run(kind, layout, shapes=matrices, lr=0.1, dtype=dtype, **options)


def memory(run):
    """What is on the device: all but step counts."""
    states = [v for state in run.optimizer.state.values() for k, v in state.items() if k != "step"]
    return [*run.params, *(p.grad for p in run.params), *states]


def scaled(run, found_inf):
    """What `GradScaler` leaves at the optimizer."""
    run.optimizer.found_inf, run.optimizer.grad_scale = torch.tensor(found_inf), torch.tensor(4.0)


def steps_on_device(case, layout, how, count=7, bad=4):
    """Steps, of which one is skipped; the waits in those after the first, which make plans and roots."""
    waits = []
    with devices.stand_in(OnItsWay):
        run = run_of(case, layout)
        for number in range(count):
            run.give(number)
            give(run, how, number == bad)
            norm = torch.tensor(torch.nan if number == bad else 1.0) if how == "grad_norm" else None
            if number < 4:
                run.optimizer.step(grad_norm=norm)
                continue
            held = [*memory(run), *([norm] if norm is not None else [])]
            if how == "scaler":
                held += [run.optimizer.found_inf, run.optimizer.grad_scale]
            with host_waits(held) as found:
                run.optimizer.step(grad_norm=norm)
            waits += found.found
        skipped = run.optimizer.skipped_steps
        result = run.result()
    return waits, skipped, result


def give(run, how, bad):
    """Make a step's gradients bad, and say so as the kind of check has it."""
    if bad:
        for p in run.params[:1]:
            local_of(p.grad).view(-1)[:1] = torch.inf
    if how == "scaler":
        for p in run.params:
            local_of(p.grad).mul_(4)
        scaled(run, 1.0 if bad else 0.0)


def steps_on_cpu(case, layout, how, count=7, bad=4):
    run = run_of(case, layout)
    for number in range(count):
        run.give(number)
        give(run, how, number == bad)
        norm = torch.tensor(torch.nan if number == bad else 1.0) if how == "grad_norm" else None
        run.optimizer.step(grad_norm=norm)
    return run.optimizer.skipped_steps, run.result()


@every_kind
@pytest.mark.parametrize(
    "how", ["own check", *(pytest.param(how, marks=pytest.mark.long) for how in ("grad_norm", "scaler"))]
)
def test_no_step_waits_for_the_device_and_a_skipped_one_changes_nothing(case, how):
    waits, skipped, result = steps_on_device(case, "plain", how)
    assert waits == []
    expected = steps_on_cpu(case, "plain", how)
    assert skipped == expected[0] == 1
    same(result, expected[1])


@pytest.mark.parametrize("case", ["AdamW", "Muon", "Muon gram", "Shampoo", "SOAP", "Mixed"])
@on_ranks(3)
def test_no_step_waits_where_blocks_are_exchanged(case):
    waits, skipped, result = steps_on_device(case, "elements", "grad_norm")
    expected = steps_on_cpu(case, "elements", "grad_norm")
    same(result, expected[1])
    assert (waits, skipped) == ([], 1)


def test_a_gram_result_that_fails_on_the_device_is_standard_from_the_next_step_on(caplog, monkeypatch):
    from block_optim.muon import newton_schulz

    with devices.stand_in(OnItsWay):
        run = run_of("Muon gram")
        run.give(0)
        before = [p.detach().clone() for p in run.params]
        gram = newton_schulz._gram
        monkeypatch.setattr(newton_schulz, "_gram", lambda *a: [t.mul(torch.nan) for t in gram(*a)])
        run.optimizer.step()
        for p, old in zip(run.params, before, strict=True):
            torch.testing.assert_close(
                p.detach(), old * (1 - 0.1 * run.optimizer.param_groups[0]["weight_decay"])
            )
        run.step(1)
        assert run.optimizer.fallbacks == 3
        assert "the standard form replaces it" in caplog.text
        assert all(not torch.allclose(p, old, atol=1e-2) for p, old in zip(run.params, before, strict=True))


def test_a_large_gradient_is_cut_on_the_device_as_on_the_cpu():
    def run(**options):
        p = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = Shampoo([p], lr=0.1, skip_nonfinite=False, **SMALL)
        p.grad = torch.full((4, 4), 1e30)
        optimizer.step()
        assert p.grad.max() == 1e30
        return p.detach()

    expected = run()
    with devices.stand_in(OnItsWay):
        assert torch.equal(run(), expected)

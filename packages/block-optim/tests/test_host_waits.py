"""On a device no step waits for it, with the bits of the CPU, also where a step is skipped."""

import pytest
import torch
from runs import SHAPES, same, small
from runs import run_of as any_run

from block_optim import Shampoo, local_of
from block_optim.core import device as devices
from ragged_shard.testing import OnItsWay, host_waits, on_ranks

pytestmark = pytest.mark.gpu_guard

LONG = ((4, 32), (40, 4), (4, 32))  # where the Gram form saves FLOPs
every_case = pytest.mark.parametrize(
    "case",
    [
        "AdamW", "AdamW fused", "AdamW, stochastic rounding", "AdamW8bit", "Muon", "Muon gram", "NorMuon",
        "Shampoo sums", "SOAP diagonal", "Mixed", "Mixed 8-bit",
    ],
)  # fmt: skip


def run_of(case, layout="plain"):
    return any_run(case, layout, shapes=LONG if "gram" in case else SHAPES)


def memory(run):
    """What is on the device: all but step counts."""
    states = [v for state in run.optimizer.state.values() for k, v in state.items() if k != "step"]
    return [*run.params, *(p.grad for p in run.params), *states]


def steps_of(run, how, watched=7):
    """Seven steps, of which one is skipped; the waits in those from ``watched`` on, when plans and roots are made."""
    waits = []
    for number in range(7):
        run.give(number)
        norm = None
        if number == 4:
            local_of(run.params[0].grad).view(-1)[:1] = torch.inf
        if how == "grad_norm":
            norm = torch.tensor(torch.nan if number == 4 else 1.0)
        elif how == "scaler":  # as `GradScaler` leaves it
            for p in run.params:
                local_of(p.grad).mul_(4)
            run.optimizer.found_inf = torch.tensor(float(number == 4))
            run.optimizer.grad_scale = torch.tensor(4.0)
        inputs = [norm, getattr(run.optimizer, "found_inf", None), getattr(run.optimizer, "grad_scale", None)]
        with host_waits([*memory(run), *(t for t in inputs if t is not None)]) as host:
            run.optimizer.step(grad_norm=norm)
        waits += host.lines if number >= watched else []
    return waits, run.optimizer.skipped_steps, run.result()


def check(case, layout, how):
    """Run on a stand-in for a device, and on the CPU."""
    with devices.stand_in(OnItsWay):
        waits, skipped, result = steps_of(run_of(case, layout), how, watched=4)
    _, expected_skips, expected = steps_of(run_of(case, layout), how)
    assert waits == []
    assert skipped == expected_skips == 1
    same(result, expected)


@every_case
@pytest.mark.parametrize(
    "how", ["own check", *(pytest.param(how, marks=pytest.mark.long) for how in ("grad_norm", "scaler"))]
)
def test_no_step_waits_for_the_device_and_a_skipped_one_changes_nothing(case, how):
    check(case, "plain", how)


@pytest.mark.parametrize(
    "case",
    [
        *("AdamW", "Muon", "Mixed"),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in ("Muon gram", "Shampoo sums", "SOAP diagonal")
        ),
    ],
)
@on_ranks(3)
def test_no_step_waits_where_blocks_are_exchanged(case):
    check(case, "elements", "grad_norm")


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
        optimizer = Shampoo([p], lr=0.1, skip_nonfinite=False, **small())
        p.grad = torch.full((4, 4), 1e30)
        optimizer.step()
        assert p.grad.max() == 1e30
        return p.detach()

    expected = run()
    with devices.stand_in(OnItsWay):
        assert torch.equal(run(), expected)

"""A capturable step reads nothing from the device and counts there, with the bits of the plain step."""

from typing import Any

import pytest
import runs
import torch
from runs import SHAPES, Mix, Run, same

from block_optim.core import device as devices
from ragged_shard.testing import OnItsWay, host_waits

CASES = ("AdamW", "AdamW maximize", "AdamW fused", "AdamW, masters", "AdamW8bit", "Muon", "NorMuon", "Mixed")


def run_of(case, lr, **options):
    if case == "Mixed":
        return Run(Mix(("muon", {}), ("adamw8bit", {}), ("adamw", {})), shapes=SHAPES, lr=lr, **options)
    if case == "AdamW maximize":
        case, options = "AdamW", {"weight_decay": 0.0, "maximize": True, **options}
    return runs.run_of(case, lr=lr, **options)


def on_device(run):
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    counted = run.optimizer._skipped_on_device
    return [*run.params, *(p.grad for p in run.params if p.grad is not None), *states, counted]


def steps_of(run, waits=None, count=6, bad=4):
    """Steps, of which one has a gradient that is not finite, and one has none for a parameter."""
    for number in range(count):
        run.give(number, without=(1,) if number == 2 else ())
        if number == bad:
            run.params[0].grad.view(-1)[0] = torch.inf
        lr = run.optimizer.param_groups[0]["lr"]
        for group in run.optimizer.param_groups:
            if isinstance(lr, torch.Tensor):
                group["lr"].fill_(0.1 / (number + 1))
        if waits is None:
            run.optimizer.step()
            continue
        rates = [g["lr"] for g in run.optimizer.param_groups if isinstance(g["lr"], torch.Tensor)]
        with host_waits([*on_device(run), *rates]) as found:
            run.optimizer.step()
        waits += found.lines


@pytest.mark.parametrize(
    ("case", "tensor_lr"),
    [
        *((case, False) for case in CASES),
        *((case, True) for case in ("AdamW", "AdamW fused", "AdamW8bit", "Mixed")),
    ],
)
def test_no_step_reads_the_device_and_the_bits_are_those_of_the_plain_step(case, tensor_lr):
    def lr():
        return torch.tensor(0.1) if tensor_lr else 0.1

    plain = run_of(case, lr())
    steps_of(plain)
    waits: list[Any] = []
    with devices.stand_in(OnItsWay):
        run = run_of(case, lr(), capturable=True)
        steps_of(run, waits)
        assert run.optimizer.skipped_steps == plain.optimizer.skipped_steps == 1
        assert not run.optimizer._flags._pending
        result, expected = run.result(), plain.result()
    assert waits == []
    if tensor_lr and ("uon" in case or case == "Mixed"):  # the product of rate and update is rounded
        for key, value in expected.items():
            torch.testing.assert_close(result[key], value, rtol=1e-5, atol=1e-6)
    else:
        same(result, expected)


# ---------------------------------------------------------------- launches of Triton kernels

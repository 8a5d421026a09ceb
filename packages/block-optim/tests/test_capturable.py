"""A capturable step reads nothing from the device and counts there, with the bits of the plain step."""

import copy
from typing import Any

import pytest
import runs
import torch
from runs import SHAPES, Mix, Run, same
from test_launch import Kernel, row_of, variants

from block_optim import SOAP, AdamW, AdamW8bit, Mixed, Muon, Shampoo
from block_optim.adam import launch as launches
from block_optim.adam.launch import CAPTURES, Launch, Scalars
from block_optim.adam.scalars import Hyper
from block_optim.core import device as devices
from ragged_shard.testing import OnItsWay, host_waits, on_ranks

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


BF16 = torch.bfloat16
ROUNDED = {"stochastic_rounding": True, "dtype": BF16}


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("Muon", {"method": "gram"}, "capturable=True with method='gram'"),
        ("Muon", ROUNDED, "capturable=True with stochastic_rounding=True"),
        ("AdamW", ROUNDED, "capturable=True with stochastic_rounding=True"),
        ("AdamW", {"capturable": 1}, "capturable=1"),
    ],
)
def test_options_that_exclude_it_are_refused_by_name(case, options, message):
    with devices.stand_in(OnItsWay), pytest.raises(ValueError, match=message):
        run_of(case, 0.1, **{"capturable": True, **options})


@pytest.mark.parametrize("kind", [Shampoo, SOAP, AdamW, AdamW8bit, Muon])
def test_optimizers_without_it_and_parameters_on_the_cpu_are_refused_by_name(kind):
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    if "capturable" in kind.shared_options:
        with pytest.raises(ValueError, match="weight: capturable=True needs parameters on an accelerator"):
            kind([("weight", weight)], capturable=True)
    else:
        with pytest.raises(ValueError, match="capturable=True"):
            kind([{"params": [weight], "capturable": True}])


def test_groups_and_algorithms_agree_on_it():
    weights = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
    with devices.stand_in(OnItsWay):
        differ: Any = [{"params": weights[:1]}, {"params": weights[1:], "capturable": False}]
        with pytest.raises(ValueError, match="capturable=False in one group"):
            AdamW(differ, capturable=True)
        groups = [
            {"params": [w], "algorithm": k, "capturable": k == "muon"}
            for w, k in zip(weights, ("muon", "adamw"), strict=True)
        ]
        with pytest.raises(ValueError, match="capturable differs between algorithms"):
            Mixed(groups)
        mixed = Mixed(copy.deepcopy(groups[:1]))
        with pytest.raises(ValueError, match="capturable differs between algorithms"):
            mixed.add_param_group(groups[1])
        assert list(mixed.optimizers) == ["muon"]
        assert len(mixed.param_groups) == 1


def test_values_of_the_host_that_a_graph_would_keep_are_refused():
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    with devices.stand_in(OnItsWay):
        optimizer = AdamW([weight], capturable=True)
        weight.grad = torch.ones(4, 4)
        with pytest.raises(ValueError, match="grad_norm: capturable=True needs a tensor"):
            optimizer.step(grad_norm=1.0)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        optimizer.step()
    with pytest.raises(
        ValueError, match="lr: capturable=True needs a tensor"
    ):  # here the CPU is the host again
        optimizer.step()


@pytest.mark.parametrize("case", ["AdamW", "AdamW fused", "AdamW8bit", "Muon", "Mixed"])
def test_the_memory_of_a_captured_step_is_kept(case, monkeypatch):
    def kept(optimizer):
        inner = getattr(optimizer, "optimizers", {"": optimizer}).values()
        rules = [getattr(o, name, None) for o in inner for name in ("_rule", "_wide", "_narrow")]
        return [x for o in (*inner, *filter(None, rules)) for x in getattr(o, "_captured", [])]

    with devices.stand_in(OnItsWay):
        run = run_of(case, torch.tensor(0.1), capturable=True)
        run.step(0)
        assert kept(run.optimizer) == []
        with monkeypatch.context() as patch:
            patch.setattr(devices, "is_capturing", lambda: True)
            run.step(1)
            run.step(2)
        captured = kept(run.optimizer)
        assert len(captured) == {"AdamW8bit": 2, "Mixed": 4}.get(case, 1)
        run.step(3, without=(1,))
        assert kept(run.optimizer) == captured


def test_a_capture_of_another_optimizer_raises(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = AdamW([weight])
    weight.grad = torch.ones(4, 4)
    monkeypatch.setattr(devices, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="build it with capturable=True"):
        optimizer.step()


@on_ranks(3)
def test_what_would_communicate_is_refused():
    with devices.stand_in(OnItsWay):
        for layout in ("shard", "replicate"):  # ranks divide the work on copies
            with pytest.raises(ValueError, match="capturable=True: p0 travels between ranks"):
                Run(Muon, layout, shapes=((8, 6),), lr=0.1, capturable=True)
        run = Run(AdamW, "shard", shapes=((8, 6),), lr=0.1, capturable=True)
        run.give(0)
        with pytest.raises(ValueError, match="capturable=True: ranks would agree on non-finite gradients"):
            run.optimizer.step()
        run.optimizer.step(grad_norm=torch.tensor(1.0))


# ---------------------------------------------------------------- launches of Triton kernels


def test_a_graph_keeps_the_addresses_of_the_gradients_that_it_was_captured_with(monkeypatch):
    monkeypatch.setattr(launches.devices, "is_capturing", lambda: True)
    vectors = variants(Kernel())(True, True)
    launch = Launch([row_of(64)], None, vectors, vectors, capturable=True)
    table = Scalars(torch.device("cpu"), 1)
    sources = []
    for _ in range(CAPTURES):
        grad = torch.zeros(64)
        launch([grad], table, None)
        sources.append((launch._captured[launch._num_captured - 1], grad))
    assert [int(source) for source, _ in sources] == [grad.data_ptr() for _, grad in sources]
    with pytest.raises(RuntimeError, match=f"more than {CAPTURES} CUDA graphs"):
        launch([torch.zeros(64)], table, None)


def test_addresses_are_written_again_after_a_graph_has_written_others():
    vectors = variants(Kernel())(True, True)
    launch, grad = Launch([row_of(64)], None, vectors, vectors, capturable=True), torch.zeros(64)
    table = Scalars(torch.device("cpu"), 1)
    launch([grad], table, None)
    rows, _ = launch._make(32)
    rows[:, 1] = 0  # as a replayed graph leaves them
    launch([grad], table, None)
    assert rows[:, 1].tolist() == [grad.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_table_of_scalars_has_the_same_numbers_with_the_rate_on_the_device(dtype, monkeypatch):
    def table_of(*rates):
        table = Scalars(torch.device("cpu"), 1)
        for lr, step in zip(rates, (1.0, 2.0, 3.0), strict=True):
            narrow = (isinstance(lr, torch.Tensor) and lr.dtype == torch.float32) or dtype == torch.float32
            table.update([Hyper(lr, narrow, 0.9, 0.99, 1e-8, 0.1, False)], [torch.tensor(step)])
        return table.rates.clone()

    rates = [torch.tensor(value, dtype=dtype) for value in (0.1, 0.05, 0.01)]
    assert torch.equal(table_of(*rates), table_of(*(float(rate) for rate in rates)))
    table = Scalars(torch.device("cpu"), 1)
    monkeypatch.setattr(launches.devices, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="take a step before capturing"):
        table.update([Hyper(rates[0], False, 0.9, 0.99, 1e-8, 0.1, False)], [torch.tensor(1.0)])

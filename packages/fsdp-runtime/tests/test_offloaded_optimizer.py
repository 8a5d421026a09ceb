"""Optimizer states in CPU memory, updates on the (simulated) device, the next bucket's copy in flight."""

import pytest
import torch
from runtime_helpers import device, loss_of, seeded, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_runtime import fully_shard
from fsdp_runtime.checkpoint import OffloadedOptimizer
from ragged_shard.testing import RaceError

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view")  # F.linear does under a mode
KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "plain": lambda params: torch.optim.SGD(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
}


def sharded(blocks=4):
    model = seeded(width=16, blocks=blocks)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(kind, offloaded, steps=3, bucket_bytes=3000, schedule=False):
    model = sharded()
    groups = [
        {"params": list(model.blocks.parameters())},
        {"params": [model.head.weight, model.embed.weight], "lr": 0.1},
    ]
    optimizer = KINDS[kind](groups)
    if offloaded:
        optimizer = OffloadedOptimizer(optimizer, bucket_bytes=bucket_bytes)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if schedule else None
    for step in range(steps):
        loss_of(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return model, optimizer


def locals_of(model):
    return [param.to_local().detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bucket_bytes", [3000, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 1 << 28))]
)
def test_values_are_those_of_the_optimizer_itself_and_no_access_is_a_race(kind, bucket_bytes):
    with device():
        plain, _ = train(kind, False, schedule=True)
        model, _ = train(kind, True, bucket_bytes=bucket_bytes, schedule=True)
        for one, two in zip(locals_of(plain), locals_of(model), strict=True):
            assert one.equal(two)


class Log(TorchDispatchMode):
    """Copies between runs of bytes, and updates, with the stream that they are queued on."""

    def __init__(self, simulated):
        super().__init__()
        self.simulated, self.events = simulated, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        stream = self.simulated.current_stream().number
        if func is torch.ops.aten.copy_.default and args[0].dtype == torch.uint8 and args[0].ndim == 1:
            self.events.append(("copy", stream))
        elif "addcdiv" in str(func):
            self.events.append(("update", stream))
        return func(*args, **(kwargs or {}))


def test_a_bucket_is_one_copy_each_way_and_the_next_one_is_queued_before_an_update():
    with device() as simulated:
        model, optimizer = train("adamw", True, steps=2, bucket_bytes=700)
        loss_of(model, tokens(2)).backward()
        with Log(simulated) as log:
            optimizer.step()
        buckets = len(optimizer._offloaded._buckets)
        assert buckets >= 4
        copies = [stream for kind, stream in log.events if kind == "copy"]
        assert len(copies) == 2 * buckets
        assert simulated.current_stream().number not in copies
        names = "".join("c" if kind == "copy" else "u" for kind, _ in log.events)
        while "uu" in names:  # an update is several ops
            names = names.replace("uu", "u")
        assert names == "cc" + "ucc" * (buckets - 2) + "uc" + "uc"


def test_an_update_that_does_not_wait_for_its_states_is_a_race(monkeypatch):
    with device() as simulated:
        model, optimizer = train("adamw", True, steps=2)
        loss_of(model, tokens(2)).backward()
        monkeypatch.setattr(simulated, "wait", lambda *_: None)
        with pytest.raises(RaceError):
            optimizer.step()
        monkeypatch.undo()


def test_states_are_on_the_device_three_buckets_at_a_time_and_between_steps_not_at_all(monkeypatch):
    with device():
        most: list[int] = []
        step = torch.optim.AdamW.step

        def watched(self, *args):
            if hasattr(optimizer, "_offloaded"):
                copies = [copy for bucket in optimizer._offloaded._buckets for copy in bucket.copies]
                most.append(sum(copy.storage.nbytes() > 0 for copy in copies))
            return step(self, *args)

        monkeypatch.setattr(torch.optim.AdamW, "step", watched)
        model, optimizer = sharded(), None
        optimizer = OffloadedOptimizer(KINDS["adamw"](list(model.parameters())), bucket_bytes=700)
        for number in range(3):
            loss_of(model, tokens(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        copies = [copy for bucket in optimizer._offloaded._buckets for copy in bucket.copies]
        assert len(copies) == len(optimizer._offloaded._buckets) >= 4  # one storage each
        assert max(most) <= 3
        assert all(copy.storage.nbytes() == 0 for copy in copies)
        states = [
            value
            for state in optimizer._inner.state.values()
            for value in state.values()
            if value.numel() > 1
        ]
        assert all(value.to_local().untyped_storage().nbytes() == 0 for value in states)


def test_parameters_that_are_added_go_into_buckets_with_their_states():
    with device():
        results = []
        for offloaded in (False, True):
            model = sharded()
            optimizer = KINDS["adamw"](list(model.blocks.parameters()))
            if offloaded:
                optimizer = OffloadedOptimizer(optimizer, bucket_bytes=3000)
            for step in range(4):
                if step == 2:
                    optimizer.add_param_group({"params": [model.head.weight, model.embed.weight], "lr": 0.1})
                loss_of(model, tokens(step)).backward()
                optimizer.step()
                model.zero_grad()
            results.append(locals_of(model))
        assert all(one.equal(two) for one, two in zip(*results, strict=True))


def test_state_dicts_go_on_elsewhere_and_come_back():
    with device():
        model, optimizer = train("adamw", True)
        state = optimizer.state_dict()
        plain, other = train("adamw", False)
        wanted = other.state_dict()["state"]
        for index, found in state["state"].items():
            assert found["exp_avg"].to_local().equal(wanted[index]["exp_avg"].to_local())
        again = sharded()
        again.load_state_dict(model.state_dict())
        groups = [
            {"params": list(again.blocks.parameters())},
            {"params": [again.head.weight, again.embed.weight]},
        ]
        loaded = OffloadedOptimizer(torch.optim.AdamW(groups), bucket_bytes=2000)
        loaded.load_state_dict(state)
        for one, with_it in ((plain, other), (again, loaded)):
            loss_of(one, tokens(9)).backward()
            with_it.step()
        assert all(a.equal(b) for a, b in zip(locals_of(plain), locals_of(again), strict=True))


def test_the_host_waits_for_the_copies_and_the_updates_before_it_reads_states(monkeypatch):
    with device() as simulated:
        _, optimizer = train("adamw", True)
        waited = []
        monkeypatch.setattr(simulated, "wait_on_host", lambda event: waited.append(event is not None))
        optimizer.state_dict()
        assert waited == [True, True]


def test_what_it_cannot_do_is_refused():
    param = [torch.nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(TypeError, match=r"LBFGS may look at several parameters at a time"):
        OffloadedOptimizer(torch.optim.LBFGS(param))
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        OffloadedOptimizer(torch.optim.SGD(param), bucket_bytes=0)


def test_on_the_cpu_it_is_the_optimizer_itself():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = OffloadedOptimizer(torch.optim.SGD([param], lr=0.5))
    optimizer.add_param_group({"params": [other := torch.nn.Parameter(torch.ones(2))]})

    def closure():
        loss = param.sum() + other.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4
    assert param.eq(0.5).all()
    assert other.eq(0.5).all()

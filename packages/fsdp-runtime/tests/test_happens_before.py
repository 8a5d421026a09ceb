"""The whole runtime on a simulated device, where an access to memory without an order between streams raises."""

import contextlib
import gc
import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from runtime_helpers import BF16, Net, Watch, device, loss_of, mesh_of, seeded, shard, step_of, tokens
from test_custom_comm import OwnGather
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from dbuffer.encodings import BlockFP8
from dbuffer.transport import Collectives
from fsdp_runtime import CPUOffloadPolicy, QuantizationPolicy, _torch_compat, offload, reload
from fsdp_runtime._schedule.model import member_of
from fsdp_runtime.memory import unit_memory
from ragged_shard import RaggedDTensor
from ragged_shard.device import device_layer
from ragged_shard.testing import RaceError, SimulatedDevice


def train(model, steps=3, optimizer=None, **options):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        step_of(model, optimizer, step, **options)


def die_in(where, model):
    """Leave gathers or reductions of a model under way."""

    def stop(*_):
        raise KeyboardInterrupt  # for which torch calls no hook that frees memory

    if where == "unshard":
        model.blocks[0].unshard(async_op=True)
        return
    if where == "forward":
        model.blocks[1].register_forward_hook(stop)
    elif where == "backward":
        model.blocks[1].register_forward_hook(lambda module, args, out: Watch.apply(out, stop))
    else:
        model.set_is_last_backward(False)
    with contextlib.suppress(KeyboardInterrupt):
        loss_of(model, tokens()).backward()


def vectors_have_replicas(param):
    """A choice of meshes, one of which is made inside of the simulation."""
    return mesh_of(2, 2) if param.ndim == 1 else None


# Options of units, whose steps must not race; more of them: tests/programs.
CASES: dict[str, dict[str, Any]] = {
    "weights as codes": {"quantization_policy": QuantizationPolicy(weights=BlockFP8((8, 8)))},
    "on two meshes": {"shard_placement_fn": vectors_have_replicas},
    "in memory that is kept": {"reshard_after_forward": True},
}


def live(model):
    """Updates, and between them what leaves memory in other states."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            loss_of(model, tokens(2 * step + last)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens())
        model(tokens())  # no backward follows
        block = model.blocks[0]
        for gather in (block.unshard, lambda block=block: block.unshard(async_op=True).wait()):
            gather()
            assert not isinstance(block.weight, RaggedDTensor)
            block(torch.ones(2, 16))
            block.reshard()
        train(model, 1, optimizer, order=[0, 1, 0, 2, 1])
        train(model, 1, optimizer)
        assert offload(model, optimizer) > 0
        reload(model, optimizer)


@pytest.mark.parametrize("case", CASES)
def test_no_access_races_in_steps_evaluations_gathers_by_hand_and_moves(case):
    options = {"mp_policy": BF16, "reshard_after_forward": 2, **CASES[case]}
    with device() as found:
        model = shard(seeded(Net, width=16), mesh=mesh_of(4), **options)
        model.set_reduce_scatter_max_input_buffers(2)
        model.set_keep_unsharded_storage(case == "in memory that is kept")
        live(model)
        assert found.accesses > 500


class TestNoRace:
    """Each raises RaceError where an order is missing."""

    def test_offloading_returns_when_the_copies_are_there(self, monkeypatch):
        with device() as found:
            model, calls = shard(seeded(Net), mesh=mesh_of(4)), []
            monkeypatch.setattr(found, "synchronize", lambda: calls.append(1))
            offload(model)
            assert calls == [1]

    def test_with_a_hook_on_reduced_gradients_on_a_stream_of_its_own(self):
        with device() as found:
            model = shard(seeded(Net), mesh=mesh_of(4))
            model.set_all_reduce_hook(lambda grad: grad.mul_(0.5), stream=found.new_stream())
            train(model)

    def test_when_shards_in_cpu_memory_are_changed_after_an_evaluation_or_a_reshard(self):
        with device(device="cpu:0"):
            model = shard(seeded(Net), mesh=mesh_of(4), offload_policy=CPUOffloadPolicy())
            for pass_of in (lambda: model(tokens()), lambda: (model.unshard(), model.reshard())):
                with torch.no_grad():
                    pass_of()
                    for param in model.parameters():
                        param.mul_(0.5)

    # With nothing but replicas, reductions read the memory of the next gradients.
    def test_after_an_exception_in_forward_or_in_backward(self):
        with device():
            model = shard(seeded(Net), mesh=mesh_of(4, 1))
            train(model, steps=1)
            model.fails = True
            for _ in range(2):
                with pytest.raises(KeyError):
                    model(tokens())
            model.fails = False
            train(model, steps=1)

            def stop():
                raise KeyError("in backward")

            model.blocks[1].register_forward_hook(lambda m, args, out: Watch.apply(out, stop))
            with pytest.raises(KeyError):
                loss_of(model, tokens()).backward()
            model.blocks[1]._forward_hooks.popitem()
            model.reset_iter_state()
            train(model, steps=1)

    @pytest.mark.parametrize("where", ["forward", "backward", "unshard", "a step that goes on"])
    def test_when_a_model_dies_with_collectives_under_way(self, where):
        with device() as found:
            for _ in range(2):
                model = shard(seeded(Net), mesh=mesh_of(2, 2), mp_policy=BF16)
                train(model, steps=2)
                die_in(where, model)
                del model
                gc.collect()
                found.raise_late()

    def test_when_backward_runs_in_another_thread(self):
        with device() as found:
            model = shard(seeded(Net), mesh=mesh_of(4), mp_policy=BF16)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            failures = []

            def backward(loss):
                try:
                    with found.on(None):
                        loss.backward()
                except BaseException as error:
                    failures.append(error)

            for step in range(3):
                thread = threading.Thread(target=backward, args=(loss_of(model, tokens(step)),))
                thread.start()
                thread.join()
                assert not failures
                optimizer.step()
                optimizer.zero_grad()

    @pytest.mark.parametrize("own", [False, True])
    def test_when_gathers_follow_the_optimizers_event(self, own):
        class Event:
            """As `torch.cuda.Event`, which `torch.Stream.wait_event` takes for one that was never recorded."""

            clock: ClassVar[dict[int, int]] = {}

            def __init__(self, event):
                self.wait = event.wait

        with device() as found:
            model = shard(seeded(Net), mesh=mesh_of(4), mp_policy=BF16)
            train(model, steps=1)
            side = found.new_stream()
            for assign in (False, True):
                loss_of(model, tokens()).backward()
                assigned = nn.Parameter(model.blocks[0].weight.detach() * 2)
                with found.on(side):
                    torch.optim.SGD(model.parameters(), lr=0.01).step()
                    model.set_post_optim_event(Event(found.record()) if own else found.record())
                if assign:
                    model.blocks[0].weight = assigned
                loss = loss_of(model, tokens())
                found.wait(found.record(side))
                model.zero_grad()
                loss.backward()

    def test_when_a_step_is_ended_by_hand(self):
        with device():
            model = shard(seeded(Net), mesh=mesh_of(4), mp_policy=BF16)
            model.set_manual_backward_finalization(True)
            for async_op in (False, True):
                loss_of(model, tokens()).backward()
                handle = model.finalize_backward(async_op=async_op)
                if async_op:
                    handle.wait()
                assert all(p.grad is not None for p in model.parameters())
                torch.optim.AdamW(model.parameters(), lr=0.01).step()

    def test_when_collectives_of_the_users_own_return_a_work(self):
        with device():
            model = shard(seeded(Net), mesh=mesh_of(4), mp_policy=BF16)
            model.blocks[1].set_custom_all_gather(OwnGather())
            train(model, steps=2)

    def test_when_another_parallelism_leaves_a_gradient_on_its_way(self):
        with device():
            mesh = mesh_of(4)
            coming = funcol.all_reduce(torch.ones(8), "sum", mesh)
            grad = DTensor.from_local(coming, mesh, [Replicate()], run_check=False)
            assert _torch_compat.local_of_dtensor_grad(grad, (Replicate(),)).sum() == 32


def test_a_device_on_which_nothing_waits_races(monkeypatch):
    with device():
        model = shard(seeded(Net), mesh=mesh_of(4))
        monkeypatch.setattr(SimulatedDevice, "wait", lambda self, event, stream=None: None)
        with pytest.raises(RaceError, match="has no order after"):
            train(model)


def test_gathered_memory_has_the_pool_of_its_stream_which_does_not_grow():
    with device() as found:
        model = shard(seeded(Net, width=32), mesh=mesh_of(4), mp_policy=BF16)
        train(model, steps=2)  # with the optimizer's state
        peaks = dict(found.pools.peak)
        train(model, steps=3)
        assert found.pools.peak == peaks
        used, gathered, computed = sorted(peaks.values())
        assert used <= sum(1 for _ in model.parameters())  # a byte for each that was used
        assert computed == peaks["the default stream"]
        sizes = [sum(unit_memory(unit).gathered) for unit in (model, *model.blocks)]
        assert gathered <= sizes[0] + 2 * max(sizes[1:])  # the root, and one block beside the next


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("waits", [True, False])
def test_an_optimizer_in_the_gradients_hooks_is_ordered_before_later_gathers(shape, waits):
    with device():
        model = shard(seeded(Net), mesh=mesh_of(*shape))
        optimizers = {p: torch.optim.SGD([p], lr=0.1, foreach=False) for p in model.parameters()}

        def update(param):
            optimizers[param].step()
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(update)
        for step in range(4):
            model.set_is_last_backward(waits or step % 2 == 1)
            loss_of(model, tokens(step)).backward()
        assert all(param.grad is None for param in model.parameters())


class Lanes(Collectives):
    """Notes how much of the computation each gather waits for."""

    known: ClassVar[list[int]] = []

    def all_gather(self, pairs, label):
        self.known.append(device_layer("cpu").current_stream().clock.get(1, 0))
        return super().all_gather(pairs, label)


@pytest.mark.parametrize("written", [False, True])
def test_the_first_gather_of_backward_waits_for_the_computation_only_if_shards_were_written(written):
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4), transport=Lanes)
        train(model, steps=2)
        loss = loss_of(model, tokens())
        if written:
            with torch.no_grad():
                for param in model.blocks.parameters():
                    param.to_local().add_(0.0)
        before = found.current_stream().clock[1]
        Lanes.known.clear()
        loss.backward()
        assert (Lanes.known[0] >= before) is written


class Sums(Collectives):
    """Notes for each reduce-scatter whether it waits for an all-reduce over replicas of the same backward."""

    started: ClassVar[dict[int, int]] = {}
    waits: ClassVar[list[bool]] = []

    def reduce_scatter(self, pairs, op, label):
        clock = device_layer("cpu").current_stream().clock
        self.waits.append(any(clock.get(stream, 0) >= time for stream, time in self.started.items()))
        return super().reduce_scatter(pairs, op, label)

    def all_reduce(self, tensors, op, label):
        work = super().all_reduce(tensors, op, label)
        stream = device_layer("cpu").current_stream()
        self.started.setdefault(stream.number, stream.clock.get(stream.number, 0) + 1)  # what comes after it
        return work


@pytest.mark.parametrize("together", [False, True])
def test_replicas_are_summed_under_the_next_units_reduction(together, monkeypatch):
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(2, 2), transport=Sums)
        train(model, steps=1)
        if together:  # the control: one stream for both
            streams = member_of(model).passes.streams
            monkeypatch.setattr(streams, "replicate", streams.reduce)
        Sums.waits.clear()
        loss = loss_of(model, tokens())
        Sums.started.clear()
        loss.backward()
        assert len(Sums.waits) == len(model.blocks) + 1
        assert any(Sums.waits) is together
        found.synchronize()


class Watched(Collectives):
    """Notes the stream on which each kind of collective is started."""

    streams: ClassVar[dict[str, set[str]]] = {}

    def _start(self, call, calls, **options):
        name = device_layer("cpu").current_stream().name
        self.streams.setdefault("reductions" if "op" in options else "gathers", set()).add(name)
        return super()._start(call, calls, **options)


def test_each_kind_of_collective_has_a_stream_beside_the_one_that_computes():
    Watched.streams.clear()
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(2, 2), transport=Watched)
        train(model, steps=1)
        computing = found.current_stream().name
    gathers, reductions = Watched.streams["gathers"], Watched.streams["reductions"]
    assert len(gathers) == 1
    assert len(reductions) == 2  # over shards, and over replicas
    assert len({computing} | gathers | reductions) == 4


def test_a_capture_of_a_unit_raises():
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(4))
        found.capturing = True
        with pytest.raises(RuntimeError, match="Net cannot be captured into a graph"):
            loss_of(model, tokens())
        with pytest.raises(RuntimeError, match=r"blocks\.0 cannot be captured"):
            model.blocks[0].unshard()
        found.capturing = False
        train(model)

"""The whole runtime on a simulated device, where an access to memory without an order between streams raises."""

import contextlib
import gc
import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from runtime_helpers import (
    BF16,
    COMPLETES,
    Net,
    Watch,
    device,
    loss_of,
    mesh_of,
    seeded,
    shard,
    step_of,
    tokens,
)
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import block_optim
from dbuffer.encodings import BlockFP8, BlockInt8
from dbuffer.transport import Collectives, collectives
from fsdp_runtime import (
    CPUOffloadPolicy,
    OffloadPolicy,
    QuantizationPolicy,
    _torch_compat,
    offload,
    reload,
)
from fsdp_runtime.memory import gathered_memory
from ragged_shard import RaggedDTensor
from ragged_shard.device import device_layer
from ragged_shard.testing import RaceError, SimulatedDevice

FP8 = QuantizationPolicy(weights=BlockFP8((8, 8)))


class SmallBuckets(block_optim.Muon):
    """Muon whose transfers take several buckets."""

    bucket_bytes = 1 << 9


class OwnGather:
    """FSDP2's protocol. Returns a work, although it was asked not to."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return collectives.compat.all_gather(output_tensor, input_tensor, group=group, async_op=True)


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


def vectors_on(mesh):
    """A choice of meshes: vectors are on this one."""
    return lambda param: mesh if param.ndim == 1 else None


def two_meshes(**options):
    """Options of units whose vectors have replicas; of the mesh that is made inside of the simulation."""
    return {"shard_placement_fn": lambda param: vectors_on(mesh_of(2, 2))(param), **options}


# Options of units, whose steps must not race, and methods that are called on the root.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in fp32": ({}, {}),
    "in bf16": ({"mp_policy": BF16}, {"set_prefetch_depth": 3}),
    "on demand": ({"mp_policy": BF16}, {"set_prefetch_depth": 0}),
    "weights as codes": ({"mp_policy": BF16, "quantization_policy": FP8}, {}),
    "weights as codes, kept by neighbors": (
        {"mp_policy": BF16, "quantization_policy": FP8, "reshard_after_forward": 2},
        {},
    ),
    "kept by neighbors": ({"mp_policy": BF16, "reshard_after_forward": 2}, {}),
    "gradients exchanged in bf16": ({"quantization_policy": QuantizationPolicy(gradients="bf16")}, {}),
    "gradients exchanged in int8": (
        {
            "mp_policy": BF16,
            "quantization_policy": QuantizationPolicy(gradients=BlockInt8(64, rounding="stochastic")),
        },
        {"set_copy_gradients_late": True},
    ),
    "kept after forward": ({"reshard_after_forward": False}, {"set_copy_gradients_late": True}),
    "kept after backward": ({"reshard_after_forward": False}, {"set_reshard_after_backward": False}),
    "in memory that is kept": ({"mp_policy": BF16}, {"set_keep_unsharded_storage": True}),
    "with replicas": ({"shape": (2, 2), "mp_policy": BF16}, {}),
    "on one rank": ({"shape": (1,), "mp_policy": BF16}, {}),
    "on two meshes": (two_meshes(mp_policy=BF16), {"set_reduce_scatter_max_input_buffers": 2}),
    "on two meshes, kept by neighbors": (
        two_meshes(mp_policy=BF16, reshard_after_forward=2),
        {"set_reduce_scatter_max_input_buffers": 2},
    ),
    "two reductions in flight": ({}, {"set_reduce_scatter_max_input_buffers": 2}),
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


# Completions at random moments find most; the two others are long.
MOMENTS = [
    moment if moment == "at random" else pytest.param(moment, marks=pytest.mark.long) for moment in COMPLETES
]


@pytest.mark.parametrize("completes", MOMENTS)
@pytest.mark.parametrize("case", CASES)
def test_no_access_races_in_steps_evaluations_gathers_by_hand_and_moves(case, completes):
    (options, methods), ranks = CASES[case], 1 if case == "on one rank" else 4
    options = {"shape": (4,), **options}
    with device(completes, ranks=ranks, rank=ranks // 4) as found:
        model = shard(seeded(Net, width=16), mesh=mesh_of(*options.pop("shape")), **options)
        for method, value in methods.items():
            getattr(model, method)(value)
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

    @pytest.mark.parametrize("completes", MOMENTS)
    def test_with_partial_sums_of_replicas_that_are_divided(self, completes):
        with device(completes):
            model = shard(seeded(Net), mesh=mesh_of(2, 2), mp_policy=BF16)
            for step in range(4):
                model.set_requires_all_reduce(step % 2 == 1)
                loss_of(model, tokens(step)).backward()
            model.set_gradient_divide_factor(3.0)
            model.set_force_sum_reduction_for_comms(True)
            train(model, steps=1)

    @pytest.mark.parametrize("shape", [(4,), (2, 2)])
    def test_with_a_hook_on_reduced_gradients(self, shape):
        with device() as found:
            model = shard(seeded(Net), mesh=mesh_of(*shape))
            stream = found.new_stream() if len(shape) == 1 else None
            model.set_all_reduce_hook(lambda grad: grad.mul_(0.5), stream=stream)
            train(model)

    @pytest.mark.parametrize("shape", [pytest.param((4,), marks=pytest.mark.long), (2, 2)])
    def test_with_shards_in_cpu_memory(self, shape):
        with device("at random", device="cpu:0"):
            for options in ({"mp_policy": BF16}, {"shard_placement_fn": vectors_on(mesh_of(2, 2))}):
                offload = CPUOffloadPolicy()
                model = shard(seeded(Net), mesh=mesh_of(*shape), offload_policy=offload, **options)
                assert model.blocks[0].weight.device.type == "cpu"
                train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, foreach=False))

    def test_when_shards_in_cpu_memory_are_changed_after_an_evaluation_or_a_reshard(self):
        with device("late", device="cpu:0"):
            model = shard(seeded(Net), mesh=mesh_of(4), offload_policy=CPUOffloadPolicy())
            for pass_of in (lambda: model(tokens()), lambda: (model.unshard(), model.reshard())):
                with torch.no_grad():
                    pass_of()
                    for param in model.parameters():
                        param.mul_(0.5)

    def test_with_frozen_and_unused_parameters(self):
        with device():
            model = seeded(Net, blocks=4)
            model.blocks[1].weight.requires_grad_(False)
            shard(model, mesh=mesh_of(4))
            train(model, steps=2)
            model.set_reduce_scatter_unused_params(True)
            train(model, steps=2, order=[0, 1])
            model.blocks[2].bias.requires_grad_(False)
            train(model, steps=2)

    # With nothing but replicas, reductions read the memory of the next gradients.
    @pytest.mark.parametrize(("shape", "offload"), [((4, 1), OffloadPolicy()), ((4,), CPUOffloadPolicy())])
    def test_after_an_exception_in_forward_or_in_backward(self, shape, offload):
        with device("late", device="cpu:0"):
            model = shard(seeded(Net), mesh=mesh_of(*shape), offload_policy=offload)
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
        with device("late") as found:
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

    def test_when_gathers_follow_the_optimizers_event(self):
        with device() as found:
            model = shard(seeded(Net), mesh=mesh_of(4), mp_policy=BF16)
            train(model, steps=1)
            side = found.new_stream()
            for assign in (False, True):
                loss_of(model, tokens()).backward()
                assigned = nn.Parameter(model.blocks[0].weight.detach() * 2)
                with found.on(side):
                    torch.optim.SGD(model.parameters(), lr=0.01).step()
                    model.set_post_optim_event(found.record())
                if assign:
                    model.blocks[0].weight = assigned
                loss = loss_of(model, tokens())
                found.wait(found.record(side))
                model.zero_grad()
                loss.backward()

    def test_when_released_memory_is_watched_and_blocks_are_recomputed_in_backward(self, monkeypatch):
        monkeypatch.setenv("DBUFFER_DEBUG_MEMORY", "1")
        with device("at random"):
            train(shard(seeded(Net, recompute=True), mesh=mesh_of(2, 2), mp_policy=BF16), steps=2)

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

    @pytest.mark.parametrize("kind", ["AdamW8bit", "Muon"])
    def test_with_the_optimizers_of_block_optim(self, kind):
        with device():
            model = shard(seeded(Net, width=16), mesh=mesh_of(4))
            if kind == "Muon":
                params = [p for p in model.parameters() if p.ndim == 2]
                optimizer = SmallBuckets(params, lr=0.01)
            else:
                optimizer = getattr(block_optim, kind)(model.parameters(), lr=0.01)
            train(model, optimizer=optimizer)


def test_a_device_on_which_nothing_waits_races(monkeypatch):
    with device():
        model = shard(seeded(Net), mesh=mesh_of(4))
        monkeypatch.setattr(SimulatedDevice, "wait", lambda self, event, stream=None: None)
        with pytest.raises(RaceError, match="has no order after"):
            train(model)


def test_gathered_memory_and_activations_share_one_pool():
    with device() as found:
        model = shard(seeded(Net, width=32), mesh=mesh_of(4), mp_policy=BF16)
        train(model, steps=2)
        assert found.pools.peak.keys() == {"the default stream"}
        # Blocks of their own pool would add the gathered memory's peak to the activations'.
        gathered = gathered_memory(model).peak_bytes
        assert gathered > 0.1 * found.pools.reserved


class Watched(Collectives):
    """Notes the stream on which each kind of collective is started."""

    streams: ClassVar[dict[str, set[str]]] = {}

    def _start(self, call, calls, **options):
        name = device_layer("cpu").current_stream().name
        self.streams.setdefault("reductions" if "op" in options else "gathers", set()).add(name)
        return super()._start(call, calls, **options)


def test_gathers_and_reductions_have_a_stream_each_beside_the_one_that_computes():
    Watched.streams.clear()
    with device() as found:
        model = shard(seeded(Net), mesh=mesh_of(2, 2), transport=Watched)
        train(model, steps=1)
        computing = found.current_stream().name
    gathers, reductions = Watched.streams["gathers"], Watched.streams["reductions"]
    assert len(gathers) == len(reductions) == 1
    assert len({computing} | gathers | reductions) == 3


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

"""Wrong use raises, on every rank, with names and the way out."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import SPECS, layout_for, make, mesh_of
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import AllReduce, DBuffer, Gather, HandleState, ReduceScatter
from layout_planner import Rows, TensorSpec, Tile, plan
from ragged_shard.testing import on_ranks, run_ranks


def raised_by_all(world_size, message, fn, *args, **options):
    """`fn` raises a ValueError with `message` on every rank, well before a time-out."""
    run_ranks(world_size, raises, message, fn, args, options)


def raises(message, fn, args, options):
    with pytest.raises(ValueError, match=message):
        fn(*args, **options)


def build(layouts, shape=(), dtypes=(torch.float32,), **options):
    """A buffer from the layout (and dtype) of this rank; the last serves all further ranks."""
    rank = dist.get_rank()
    mesh = mesh_of(*shape)
    if mesh.ndim == 2:
        options.setdefault("replicate_dim", 0)
    DBuffer(layouts[min(rank, len(layouts) - 1)], mesh, dtype=dtypes[min(rank, len(dtypes) - 1)], **options)


def test_a_layout_for_another_number_of_ranks_also_on_one_rank_only():
    message = "planned for 2 ranks, mesh axis 0 has 3; plan with world_size=3"
    for layouts in ([layout_for(2)], [layout_for(3), layout_for(2), layout_for(3)]):
        raised_by_all(3, message, build, layouts)


def changed(**change):
    return plan([TensorSpec(s.name, *change.get(s.name, (s.shape, s.block))) for s in SPECS], 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed(weight=((14, 6), Rows(1))), r"tensor weight is \((13|14), 6\) in blocks"),
        (changed(tiled=((16, 8), Tile(8, 8))), "tensor tiled is .* in blocks tile:"),
        (plan(SPECS[1:], 2), "tensor weight is only (here|there)"),
        (plan(SPECS, 2, align=16), "align is"),
        (plan(SPECS[::-1], 2), "(in another order|at element)"),
    ],
)
def test_ranks_with_different_layouts_all_name_the_first_difference(other, message):
    raised_by_all(2, message, build, [layout_for(2), other])


def test_replicas_with_different_layouts_and_ranks_with_different_dtypes_all_name_the_difference():
    two = layout_for(2)
    raised_by_all(4, "tensor weight is only", build, [two, two, two, plan(SPECS[1:], 2)], (2, 2))
    message = "dtype torch.(float32|bfloat16).* here, .* there"
    raised_by_all(2, message, build, [layout_for(2)], (), (torch.float32, torch.bfloat16))


def test_alignment_names_the_tensor_and_the_align_to_plan_with():
    layout = plan([TensorSpec("a", (12,)), TensorSpec("b", (12,))], 2, align=4)
    raised_by_all(2, r"(a|b) .* in torch.bfloat16; plan with align=8", build, [layout], (), (torch.bfloat16,))
    raised_by_all(2, "in torch.uint8; plan with align=16", build, [layout], (), (torch.uint8,))
    raised_by_all(2, "plan with align=8", build, [layout], full_dtype=torch.bfloat16)
    run_ranks(2, build, [layout])


@on_ranks(1)
def test_constructor_arguments_that_cannot_be():
    for name, value, kind, message in (
        ("dtype", torch.complex64, ValueError, "dtype torch.complex64: buffers hold real numbers"),
        ("dtype", "float32", ValueError, "dtype float32"),
        ("full_dtype", torch.bool, ValueError, "dtype torch.bool"),
        ("device", "meta", ValueError, "device meta: expected cpu or the accelerator"),
        ("shard_dim", "tp", ValueError, "shard_dim 'tp' is not among"),
        ("shard_dim", 1, ValueError, "shard_dim 1 is out of range"),
        ("replicate_dim", 0, ValueError, "name each axis once"),
        ("mesh", "cpu", TypeError, "expected a torch DeviceMesh"),
        ("layout", "weight", TypeError, "expected a layout_planner.Layout"),
        ("mesh", mesh_of(1, 1), ValueError, "the mesh has 2 axes .* pass the sub-mesh"),
    ):
        options: dict[str, Any] = {
            "layout": layout_for(1),
            "mesh": mesh_of(),
            "dtype": torch.float32,
            name: value,
        }
        with pytest.raises(kind, match=message):
            pytest.fail(f"{name}={value}: {DBuffer(options.pop('layout'), options.pop('mesh'), **options)}")


@on_ranks(1)
def test_misuse_raises():
    buffer, full, aliased = make(alias=False, name="layers.0"), make(alias=False), make()
    full.materialize()
    aliased.materialize()
    cases: tuple[tuple[Any, Any, str], ...] = (
        (
            lambda: buffer.full,
            RuntimeError,
            "layers.0: full after release; gather it or call materialize first",
        ),
        (lambda: buffer.views, RuntimeError, "layers.0: views after release"),
        (ReduceScatter([buffer]).start, RuntimeError, "layers.0: reduce_scatter after release"),
        (lambda: AllReduce([buffer]).start(), ValueError, "layers.0: all_reduce needs a replicate axis"),
        (lambda: ReduceScatter([full], op="max"), ValueError, "op is 'max'"),  # type: ignore[arg-type]
        (lambda: ReduceScatter([full], op="avg", divide=2.0).start(), ValueError, "divide=2.0 with op='avg'"),
        (lambda: ReduceScatter([full], op="sum", divide=0.0).start(), ValueError, "divide=0.0"),
        (lambda: Gather([buffer, buffer]).start(), ValueError, "each once"),
        (lambda: Gather([]).start(), ValueError, "at least one buffer"),
        (
            lambda: ReduceScatter([aliased]).start(accumulate=True),
            ValueError,
            "build the buffer with alias=False",
        ),
    )
    for use, kind, message in cases:
        with pytest.raises(kind, match=message):
            pytest.fail(f"{message}: {use()}")


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_a_buffer_with_a_collective_under_way_refuses_until_it_is_waited_for(world_size):
    buffer = make(full_dtype=torch.bfloat16)
    handle = Gather([buffer]).start()
    assert buffer.in_flight is handle
    for act in (buffer.release, Gather([buffer]).start, buffer.forget_neighbors):
        with pytest.raises(RuntimeError, match="under way; call wait"):
            act()
    states = [handle.state]
    handle.wait()
    handle.wait()
    assert [*states, handle.state] == [HandleState.STARTED, HandleState.COMPLETED]
    busy = [buffer.in_flight]
    buffer.wait()
    Gather([buffer]).start()
    buffer.wait()
    assert [*busy, buffer.in_flight] == [None, None]
    buffer.release()
    buffer.release()


@on_ranks(2)
def test_a_collective_that_fails_says_which_and_of_which_buffer_each_time():
    group = dist.new_group(timeout=timedelta(seconds=2))  # its own, so that what breaks is not used again
    buffer = make(mesh=DeviceMesh.from_group(group, "cpu"), name="layers.7")
    if dist.get_rank() == 1:
        return
    handle = Gather([buffer]).start()
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"all_gather of layers\.7 failed") as caught:
            handle.wait()
        errors.append(caught.value)
    assert errors[0] is errors[1]
    buffer.release()

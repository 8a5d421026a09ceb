"""Layouts, buffers and full tensors that several test modules use. Everything here also runs on ranks."""

import functools
import logging
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer import DBuffer
from dbuffer._order import watched
from dbuffer._torch_compat import CAN_SWAP
from dbuffer.encodings import BlockQuantizedTensor, RowRun
from dbuffer.transport.peer.handshake import connect
from dbuffer.transport.peer.peer_memory import PeerMemory
from layout_planner import Layout, Rows, Segment, TensorSpec, Tile, Whole, plan
from ragged_shard.testing import rank_mesh, simulated_ranks

can_swap = pytest.mark.skipif(not CAN_SWAP, reason="this torch cannot exchange memory between storages")
SIZE = 1 << 16  # elements of a small exchange
SPECS = (
    TensorSpec("weight", (13, 6), Rows(1)),
    TensorSpec("tiled", (16, 8), Tile(4, 8)),
    TensorSpec("scalar", ()),
    TensorSpec("bias", (5,)),
    TensorSpec("matrix", (6, 4), Whole()),
    TensorSpec("cube", (3, 4, 5), Rows(2)),
)


@functools.cache
def layout_for(world_size, align=8):
    return plan(SPECS, world_size, align=align)


@functools.cache
def split_layout(world_size, align=8):
    """The same tensors in two segments, however little it would save."""
    halves = [plan(SPECS[:3], world_size, align=align), plan(SPECS[3:], world_size, align=align)]
    segments = [Segment(s.shard_size, s.names, s.offsets) for half in halves for s in half.segments]
    assert len(segments) >= 2
    return Layout(SPECS, world_size, align, tuple(segments))


LAYOUTS = {"planned": layout_for, "split": split_layout}


def mesh_of(*shape, names=None):
    shape = shape or (dist.get_world_size(),)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = rank_mesh(*shape, names=names or ("replicate", "shard")[-len(shape) :], device=device)
    for group in mesh.get_all_groups():
        watched.pop(group, None)  # by another test on these ranks
    return mesh


def make(layout="planned", *, mesh=None, dtype=torch.float32, align=8, **options):
    mesh = mesh or mesh_of()
    if mesh.ndim == 2:
        options.setdefault("replicate_dim", 0)
    return DBuffer(LAYOUTS[layout](mesh.size(mesh.ndim - 1), align), mesh, dtype=dtype, **options)


def full_tensors(seed=0, dtype=torch.float32):
    """Small whole numbers: sums of them are exact in every dtype in use, so results can be compared by bits."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randint(-8, 9, spec.shape, generator=generator).to(dtype) for spec in SPECS}


def random_tensors(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def quantized_whole(fmt, tensor, element=0, noise=None):
    """Codes, scales and values of a whole tensor."""
    grid = fmt.grid(tuple(tensor.shape))
    run = RowRun(grid, 0, grid.rows, element=element)
    codes = torch.zeros(grid.rows * fmt.code_bytes(grid.columns), dtype=torch.uint8)
    scales = torch.zeros(grid.num_scales)
    fmt.quantize([run], tensor.reshape(-1), codes, scales, noise=noise)
    values = torch.zeros(tensor.numel())
    fmt.dequantize([run], codes, scales, values)
    return codes.view(grid.rows, -1), scales, values.view(tensor.shape)


def quantized_tensor(fmt, values):
    """The same as a tensor of codes."""
    codes, scales, _ = quantized_whole(fmt, values)
    grid = fmt.grid(tuple(values.shape))
    return BlockQuantizedTensor(
        codes.view(-1), scales, fmt, RowRun(grid, 0, grid.rows), values.shape, values.dtype
    )


def load(buffer, tensors):
    """Copy this rank's slices of full tensors into the shard. Returns the buffer."""
    for name, view in buffer.local_views.items():
        view.copy_(buffer.geometry.cut(name, tensors[name].detach()))
    return buffer


def zero(flats):
    """Zero the memory of a buffer's `shard` or `full`."""
    for flat in flats:
        flat.zero_()


def fill_views(buffer, tensors):
    buffer.materialize()
    for name, view in buffer.views.items():
        view.copy_(tensors[name])


def local_part(buffer, name, full):
    start, stop = buffer.layout.local_range(name, buffer.mesh_view.rank)
    return full.reshape(-1)[start:stop].view(buffer.local_views[name].shape)


def assert_locals_equal(buffer, tensors):
    """This rank's slices are those of full tensors, and padding is zero."""
    for name, view in buffer.local_views.items():
        torch.testing.assert_close(
            view, local_part(buffer, name, tensors[name]).to(view), rtol=0, atol=0, msg=name
        )
    assert not any(gap.any() for gap in buffer.shard_memory.gaps)


def assert_views_equal(buffer, tensors):
    for name, view in buffer.views.items():
        torch.testing.assert_close(view, tensors[name].to(view), rtol=0, atol=0, msg=name)


def storage_bytes(tensors):
    """Bytes of the storages under some tensors, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@contextmanager
def simulated_mesh(size, device):
    """SIMULATION: a mesh of `size` ranks on "cpu" or "cuda", this process rank 0."""
    with simulated_ranks(size):
        yield init_device_mesh(device, (size,), mesh_dim_names=("shard",))


@contextmanager
def transport_lines():
    """The lines that `dbuffer.transport` logs meanwhile, without the name of the group."""
    lines: list[str] = []
    handler: Any = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage().split(": ", 1)[1])
    logger = logging.getLogger("dbuffer.transport")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Interrupted(Exception):
    """What a signal handler raises."""


def error_of(call):
    """What it says when it fails, as it must."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def peers_of(timeout=30.0):
    """Connections to all other ranks, which must be able to read each other's memory."""
    world: Any = dist.group.WORLD
    peers, trouble = connect(world)
    assert not trouble, trouble
    return PeerMemory(peers, timeout)


def swap(mover, gives, takes):
    """Start an exchange, x, with all other ranks; `takes` is one tensor for each."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    receives = {r: [t] for r, t in zip(others, takes, strict=True)}
    return mover.exchange("x", {r: [gives] for r in others}, receives)


def build_large(name="unit", group=None, transport="peer_memory", rows=1024, **options):
    """A buffer whose exchanges are large enough to go directly."""
    mesh = DeviceMesh.from_group(group, "cpu") if group else mesh_of()
    layout = plan([TensorSpec("w", (rows, 1024))], mesh.size())
    given: Any = {"dtype": torch.float32, "check_ranks": False} | options
    return DBuffer(layout, mesh, name=name, transport=transport, **given)

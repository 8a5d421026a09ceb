"""Models of loose parameters, their layouts and runs of Muon over them. Everything here also runs on ranks."""

import random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from block_optim import Muon
from ragged_shard import RaggedShard, distribute_tensor

# Squares, tall, wide, prime, a single row, a single element.
SHAPES = ((8, 8), (13, 7), (7, 13), (24, 40), (40, 24), (1, 5), (1, 1), (24, 40), (24, 40))
STACKS = ((3, 8, 6), (5, 4, 7), (6, 2, 3, 3))


def tensors(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def random_units(rng, total, ranks, whole=False):
    """Shares of ``total`` units, many of them empty; with ``whole`` one rank has all."""
    if whole or total == 0:
        units = [0] * ranks
        units[rng.randrange(ranks)] = max(total, 1)
        return tuple(units)
    cuts = sorted(rng.choice([0, total, rng.randint(0, total)]) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))


def placed(tensor, mesh, layout, rng):
    """A full tensor in one of the layouts under test, on this mesh."""
    if layout == "plain":
        return tensor.clone()
    ranks = mesh.size(mesh.ndim - 1)
    if layout == "elements":
        dims = tuple(range(tensor.ndim))
        ragged = RaggedShard(dims, random_units(rng, tensor.numel(), ranks))
    elif layout == "rows":
        ragged = RaggedShard((0,), random_units(rng, tensor.shape[0], ranks))
    elif layout == "whole":
        ragged = RaggedShard((0,), random_units(rng, 1, ranks, whole=True))
    elif layout == "shard":
        return torch_distribute(tensor, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)])
    elif layout == "replicate":
        return torch_distribute(tensor, mesh, [Replicate()] * mesh.ndim)
    return distribute_tensor(tensor, mesh, [Replicate()] * (mesh.ndim - 1) + [ragged])


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(layout, shapes, *, steps=4, seed=0, dtype=torch.float32, mesh_shape=None, without=None, **options):
    """Parameters, momentum and the rest of the state after some steps of Muon, in full, whatever the layout.

    ``without``: (rank, parameter) pairs that have no gradient, rank None meaning all.
    """
    names = ("replicate", "shard")[-len(mesh_shape or (1,)) :]
    mesh = None
    if layout != "plain":
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names) if mesh_shape else world_mesh()
    rng = random.Random(f"{layout} {dist.get_world_size() if mesh else 1} {seed}")
    states = [rng.getrandbits(32) for _ in shapes]
    params = [
        torch.nn.Parameter(placed(value, mesh, layout, random.Random(s)))
        for value, s in zip(tensors(shapes, seed, dtype), states, strict=True)
    ]
    optimizer = Muon(params, lr=0.02, **options)
    for step in range(steps):
        for i, (p, grad, s) in enumerate(
            zip(params, tensors(shapes, 1000 + 31 * step, dtype), states, strict=True)
        ):
            absent = [r for r, k in without or () if k == i]
            gone = None in absent or (mesh is not None and dist.get_rank() in absent)
            value = torch.zeros_like(grad) if absent and None not in absent else grad
            if absent and None not in absent and layout != "plain":
                value = grad
            p.grad = None if gone else placed(value, mesh, layout, random.Random(s))
        optimizer.step()
    return [full(p.detach()) for p in params], [
        {k: full(v) for k, v in optimizer.state[p].items()} for p in params
    ]


def same(found, expected):
    """Assert that two results of `train` agree to the bit."""
    for i, (a, b) in enumerate(zip(found[0], expected[0], strict=True)):
        assert torch.equal(a, b), f"parameter {i} of shape {tuple(a.shape)}: {(a - b).abs().max()}"
    for i, (a, b) in enumerate(zip(found[1], expected[1], strict=True)):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]), f"{key} of parameter {i}"


class Allocations(TorchDispatchMode):
    """Counts ops whose result has memory that none of their arguments had and that is not a view of it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented
        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before and x.numel():
                self.found.append((str(func), tuple(x.shape)))
        return result


def plain_dtensor(local, mesh, shape):
    return DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=(shape[1], 1))

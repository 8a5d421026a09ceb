"""Cases: what may be wrapped, over which mesh, and what wrapping makes of a module."""

import copy
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from conformance_models import MLP, Stack, check_training, full, hsdp_mesh, is_sharded, mesh, seeded, world
from conformance_registry import Raises, case, refusal
from torch.distributed.tensor import Replicate, Shard, distribute_module

from ragged_shard.testing import rank_mesh, record_collectives

WRAP = "Wrapping"


@case(WRAP, "a 1-D mesh, which is also `mesh=None`: each element of a parameter is on one rank", ranks=3)
def one_dimension(fsdp):
    over = mesh()
    for options in ({"mesh": over}, {}):
        model: Any = fsdp.fully_shard(MLP(), **options)
        assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
        for name, parameter in model.named_parameters():
            assert parameter.device_mesh.mesh.tolist() == over.mesh.tolist(), (name, options)
            assert elements(parameter) == parameter.numel(), (name, options)


def elements(parameter, group=None):
    """Elements of a parameter on all ranks of a group together."""
    held = torch.tensor(parameter.to_local().numel())
    torch.distributed.all_reduce(held, group=group)
    return held.item()


@case(WRAP, "a 2-D mesh with named dimensions: HSDP, (replicate, shard)", ranks=4)
def hsdp(fsdp):
    def wrap(model):
        fsdp.fully_shard(model.up, mesh=over)
        fsdp.fully_shard(model, mesh=over)

    over = hsdp_mesh()
    model = check_training(MLP, wrap)
    for parameter in model.parameters():
        assert parameter.placements[0] == Replicate()
        assert not parameter.placements[1].is_replicate()
        assert elements(parameter, over.get_group("shard")) == parameter.numel()


def wrapped(fsdp, build=MLP, **options):
    return fsdp.fully_shard(build(), **{"mesh": mesh(), **options})


refusal(
    WRAP, "a 2-D mesh without names is refused", lambda fsdp: wrapped(fsdp, mesh=rank_mesh(1, world())),
    Raises(AssertionError, "mesh_dim_names"),
)  # fmt: skip
refusal(
    WRAP, "a mesh of three dimensions is refused",
    lambda fsdp: wrapped(fsdp, mesh=rank_mesh(1, 1, world(), names=("a", "b", "c"))),
    Raises(ValueError, "(?i)1.?D or 2.?D"),
)  # fmt: skip
for _name, _build in (
    ("ModuleList", lambda: nn.ModuleList([MLP()])), ("ModuleDict", lambda: nn.ModuleDict({"a": MLP()}))
):  # fmt: skip
    refusal(
        WRAP, f"a `{_name}`, which has no forward, is refused", partial(wrapped, build=_build),
        Raises(ValueError, "forward"),
    )  # fmt: skip
refusal(
    WRAP, "a non-module is refused", lambda fsdp: wrapped(fsdp, lambda: torch.zeros(3)),
    Raises(AttributeError, "modules"), Raises(TypeError, "fully_shard takes a module"),
)  # fmt: skip
refusal(
    WRAP, "a module is wrapped at most once", lambda fsdp: wrapped(fsdp, lambda: wrapped(fsdp)),
    Raises(AssertionError, "once"), Raises(AssertionError, "already called"),
)  # fmt: skip
refusal(
    WRAP, "`deepcopy` is refused", lambda fsdp: copy.deepcopy(wrapped(fsdp)), Raises(AssertionError, "deepcopy"),
)  # fmt: skip
refusal(
    WRAP, "`share_comm_ctx` refuses what is not wrapped", lambda fsdp: fsdp.share_comm_ctx([MLP()]),
    Raises(ValueError, "FSDPModule"),
)  # fmt: skip
refusal(
    WRAP, "an `int` for `reshard_after_forward` must divide the ranks",
    lambda fsdp: wrapped(fsdp, reshard_after_forward=3), Raises(ValueError, "factor|divi"),
)  # fmt: skip
refusal(
    WRAP, "`reshard_after_forward` of another type is refused",
    lambda fsdp: wrapped(fsdp, reshard_after_forward="yes"), Raises(ValueError, "reshard_after"),
)  # fmt: skip
refusal(
    WRAP, "`dp_mesh_dims` that name no dimension of the mesh",
    lambda fsdp: wrapped(
        fsdp, mesh=mesh(names=("dp",)), dp_mesh_dims=fsdp.DataParallelMeshDims(shard="nothere")
    ), Raises(ValueError, "nothere"), since=(2, 13),
)  # fmt: skip


@case(WRAP, "the same object, whose class becomes `FSDP<name>`, a subclass of `FSDPModule` too")
def class_swap(fsdp):
    model = MLP()
    same = fsdp.fully_shard(model, mesh=mesh())
    assert same is model
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(model, MLP)
    assert type(model).__name__ == "FSDPMLP"
    assert not isinstance(model.up, fsdp.FSDPModule)
    other = fsdp.fully_shard(MLP(), mesh=mesh())
    assert type(other) is type(model)
    assert model.state_dict().keys() == MLP().state_dict().keys()


@case(WRAP, "a list of modules is one unit, with one gather before it and one reduction after its backward")
def list_of_modules(fsdp):
    def wrap(model):
        given = [model.blocks[0], model.blocks[1]]
        back = fsdp.fully_shard(given, mesh=mesh(), reshard_after_forward=True)
        assert isinstance(back, list)
        assert all(a is b for a, b in zip(back, given, strict=True))
        assert all(isinstance(m, fsdp.FSDPModule) for m in given)
        fsdp.fully_shard(model, mesh=mesh())

    model = check_training(Stack, wrap)
    x = torch.randn(4, 8, requires_grad=True)
    with record_collectives() as record:
        model(x).sum().backward()
    gathers = ["all_gather"] * 3  # the root's, and the list's for each direction
    assert [kind for kind in record.kinds if kind != "all_reduce"] == [*gathers, *["reduce_scatter"] * 2]


def parent_first(fsdp):
    model = Stack()
    fsdp.fully_shard(model, mesh=mesh())
    fsdp.fully_shard(model.blocks[0], mesh=mesh())


refusal(
    WRAP, "a parent wrapped before its child is refused", parent_first,
    Raises(TypeError, "Invariant encountered"), Raises(RuntimeError, "inner modules first"),
)  # fmt: skip


def late(fsdp):
    model = Stack()
    fsdp.fully_shard(model.blocks[0], mesh=mesh())
    x = torch.randn(4, 8)
    model.blocks[0](x)
    fsdp.fully_shard(model, mesh=mesh())
    model(x)


refusal(
    WRAP, "a parent wrapped after a forward of its child is refused", late,
    Raises(RuntimeError, "lazily initialized"), Raises(RuntimeError, "before the first forward"),
)  # fmt: skip


@case(WRAP, "a slice of a wrapped `Sequential` is a plain `Sequential`")
def slices(fsdp):
    model = fsdp.fully_shard(nn.Sequential(MLP(), MLP(), MLP()), mesh=mesh())
    part = model[:2]
    assert type(part) is nn.Sequential
    assert part[1] is model[1]


@case(WRAP, "`ignored_params` are left as they are: not sharded, not reduced")
def ignored(fsdp):
    model = MLP()
    kept = model.up.weight
    fsdp.fully_shard(model, mesh=mesh(), ignored_params={kept})
    assert model.up.weight is kept
    assert not is_sharded(kept)
    assert is_sharded(model.up.bias)
    model(torch.full((2, 8), float(torch.distributed.get_rank() + 1))).sum().backward()
    assert not is_sharded(kept.grad)
    everyone = [torch.zeros_like(kept) for _ in range(world())]
    torch.distributed.all_gather(everyone, kept.grad)
    assert not torch.equal(everyone[0], everyone[1])


@case(WRAP, "a module without parameters of its own")
def nothing_to_shard(fsdp):
    def wrap(model):
        for layer in model:
            fsdp.fully_shard(layer, mesh=mesh())
        fsdp.fully_shard(model, mesh=mesh())

    check_training(lambda: nn.Sequential(MLP(), nn.Tanh(), MLP()), wrap)


@case(WRAP, "wrapping changes no values, whichever the shapes", ranks=3)
def values(fsdp):
    shapes = [(1,), (2,), (7,), (1, 1), (2, 5), (3, 4), (16, 15), (5, 1, 3), (4, 3, 2, 2)]
    model = nn.Module()
    for i, shape in enumerate(shapes):
        model.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))
    before = [p.detach().clone() for p in model.parameters()]
    fsdp.fully_shard(model, mesh=mesh())
    for old, (name, new) in zip(before, model.named_parameters(), strict=True):
        assert new.shape == old.shape, name
        assert new.requires_grad
        assert new.is_leaf
        assert torch.equal(full(new), old), name


@case(WRAP, "each rank keeps its part of its own values; nothing is broadcast")
def no_broadcast(fsdp):
    rank = torch.distributed.get_rank()
    plain = nn.Linear(4, 6)
    nn.init.constant_(plain.weight, float(rank))
    model = fsdp.fully_shard(plain, mesh=mesh())
    assert (model.weight.to_local() == rank).all()


@case(WRAP, "buffers stay whole and on every rank")
def buffers(fsdp):
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)), mesh=mesh())
    assert not any(is_sharded(b) for b in model.buffers())
    model(torch.randn(4, 8)).sum().backward()
    assert int(model[1].num_batches_tracked) == 1


@case(
    WRAP, "`shard_placement_fn` that returns None, `Shard(0)` or `Shard(1)`",
    note="changes nothing: runs of whole blocks are balanced",
)  # fmt: skip
def placements(fsdp):
    def place(p, placement):
        return placement if p.ndim == 2 else None

    for placement in (Shard(0), Shard(1)):
        choose = partial(place, placement=placement)
        check_training(
            partial(MLP, hidden=16),
            lambda m, f=choose: fsdp.fully_shard(m, mesh=mesh(), shard_placement_fn=f),
        )


@case(
    WRAP,
    "`shard_placement_fn` that returns a `ShardPlacementResult`: a mesh for each parameter",
    ranks=4,
    since=(2, 13),
    note="a `DeviceMesh` works too; [more](docs/parallelism.md#experts)",
)
def mesh_of_a_parameter(fsdp):
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    def wrap(model):
        flat = FSDPMeshInfo(mesh(), shard_mesh_dim=0)
        hybrid = HSDPMeshInfo(hsdp_mesh(), shard_mesh_dim=1, replicate_mesh_dim=0)
        fsdp.fully_shard(
            model,
            mesh=flat.mesh,
            shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), hybrid if p.ndim == 1 else flat),
        )
        assert model.up.bias.device_mesh.ndim == 2
        assert model.up.weight.device_mesh.ndim == 1

    check_training(MLP, wrap)


@case(
    WRAP, "`dp_mesh_dims`: DTensor parameters on one mesh of all parallelisms; two dimensions are flattened", ranks=4,
    since=(2, 13),
)  # fmt: skip
def spmd_mesh(fsdp):
    over = mesh(2, 2, names=("dp", "other"))
    for shard, copies in (("dp", 2), (("dp", "other"), 1)):
        model = distribute_module(seeded(MLP), over)
        fsdp.fully_shard(model, mesh=over, dp_mesh_dims=fsdp.DataParallelMeshDims(shard=shard))
        for found, p in zip(model.parameters(), seeded(MLP).parameters(), strict=True):
            assert torch.equal(full(found), p), shard
            assert elements(found) == copies * p.numel(), shard


@case(
    WRAP, "`dp_mesh_dims` with replicas only", ours=Raises(ValueError, "no shard dimension"),
    note="use `DistributedDataParallel`", refusal=True, since=(2, 13),
)  # fmt: skip
def spmd_mesh_replicas(fsdp):
    over = mesh(world(), names=("dp",))
    model, reference = distribute_module(seeded(MLP), over), seeded(MLP)
    fsdp.fully_shard(model, mesh=over, dp_mesh_dims=fsdp.DataParallelMeshDims(replicate="dp"))
    for found, p in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(found), p)

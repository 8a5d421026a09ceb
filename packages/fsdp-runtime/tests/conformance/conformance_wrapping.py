"""Cases: what may be wrapped, over which mesh, and what wrapping makes of a module."""

import copy

import torch
import torch.nn as nn
from conformance_models import (
    MLP,
    Stack,
    all_sharded,
    check_training,
    full,
    hsdp_mesh,
    is_sharded,
    mesh,
    seeded,
    shard_stack,
    world,
)
from conformance_registry import Raises, case
from torch.distributed.tensor import Replicate, Shard, distribute_module

from ragged_shard.testing import rank_mesh

WRAP = "Wrapping"


@case(WRAP, "`mesh=None`: all ranks, one dimension")
def default_mesh(fsdp):
    model = fsdp.fully_shard(MLP())
    assert all(p.device_mesh.size() == world() and p.device_mesh.ndim == 1 for p in model.parameters())


@case(WRAP, "a 1-D mesh: each element of a parameter is on one rank", ranks=3)
def one_dimension(fsdp):
    over = mesh()
    model = fsdp.fully_shard(MLP(), mesh=over)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.device_mesh == over, name
        held = torch.tensor(parameter.to_local().numel())
        torch.distributed.all_reduce(held)
        assert held.item() == parameter.numel(), name


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
        held = torch.tensor(parameter.to_local().numel())
        torch.distributed.all_reduce(held, group=over.get_group("shard"))
        assert held.item() == parameter.numel()


@case(WRAP, "a 2-D mesh without names is refused", fsdp2=Raises(AssertionError, "mesh_dim_names"))
def nameless_mesh(fsdp):
    fsdp.fully_shard(MLP(), mesh=rank_mesh(1, world()))


@case(WRAP, "a mesh of three dimensions is refused", fsdp2=Raises(ValueError, "(?i)1.?D or 2.?D"))
def three_dimensions(fsdp):
    fsdp.fully_shard(MLP(), mesh=rank_mesh(1, 1, world(), names=("a", "b", "c")))


@case(
    WRAP,
    "`ModuleList` and `ModuleDict`, which have no forward, are refused",
    fsdp2=Raises(ValueError, "forward"),
)
def containers(fsdp):
    try:
        fsdp.fully_shard(nn.ModuleDict({"a": MLP()}), mesh=mesh())
    except ValueError:
        fsdp.fully_shard(nn.ModuleList([MLP()]), mesh=mesh())


@case(
    WRAP,
    "a non-module is refused",
    fsdp2=Raises(AttributeError, "modules"),
    ours=Raises(TypeError, "fully_shard takes a module"),
)
def no_module(fsdp):
    fsdp.fully_shard(torch.zeros(3), mesh=mesh())


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


@case(WRAP, "a list of modules is one unit, with one gather")
def list_of_modules(fsdp):
    from ragged_shard.testing import record_collectives

    def wrap(model):
        given = [model.blocks[0], model.blocks[1]]
        back = fsdp.fully_shard(given, mesh=mesh(), reshard_after_forward=True)
        assert isinstance(back, list)
        assert all(a is b for a, b in zip(back, given, strict=True))
        assert all(isinstance(m, fsdp.FSDPModule) for m in given)
        fsdp.fully_shard(model, mesh=mesh())

    model = check_training(Stack, wrap)
    x = torch.randn(4, 8)
    model.eval()
    with torch.no_grad(), record_collectives() as record:
        model(x)
    assert record.kinds == ["all_gather"] * 2, record.kinds


@case(WRAP, "a nested module wrapped first keeps its unit; the parent has the rest")
def nested(fsdp):
    from ragged_shard.testing import record_collectives

    def wrap(model):
        shard_stack(fsdp, model)

    model = check_training(Stack, wrap)
    with torch.no_grad(), record_collectives() as record:
        model(torch.randn(4, 8))
    assert record.kinds == ["all_gather"] * 4, record.kinds
    assert all_sharded(model.blocks[0])


@case(
    WRAP,
    "a parent wrapped before its child",
    fsdp2=Raises(TypeError, "Invariant encountered"),
    ours=None,
    note="units may be made in any order",
)
def parent_first(fsdp):
    def wrap(model):
        fsdp.fully_shard(model, mesh=mesh())
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh())

    check_training(Stack, wrap)


@case(
    WRAP,
    "a module is wrapped at most once",
    fsdp2=Raises(AssertionError, "once"),
    ours=Raises(AssertionError, "already called"),
)
def wrapped_twice(fsdp):
    model = fsdp.fully_shard(MLP(), mesh=mesh())
    fsdp.fully_shard(model, mesh=mesh())


@case(WRAP, "a slice of a wrapped `Sequential` is a plain `Sequential`")
def slices(fsdp):
    model = fsdp.fully_shard(nn.Sequential(MLP(), MLP(), MLP()), mesh=mesh())
    part = model[:2]
    assert type(part) is nn.Sequential
    assert part[1] is model[1]


@case(WRAP, "`deepcopy` is refused", fsdp2=Raises(AssertionError, "deepcopy"))
def deepcopy(fsdp):
    copy.deepcopy(fsdp.fully_shard(MLP(), mesh=mesh()))


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
    WRAP,
    "`shard_placement_fn` that returns `Shard(1)`",
    note="changes nothing: runs of whole blocks are balanced",
)
def shard_on_columns(fsdp):
    build = lambda: MLP(hidden=16)  # noqa: E731
    check_training(
        build,
        lambda model: fsdp.fully_shard(
            model, mesh=mesh(), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None
        ),
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


@case(WRAP, "`shard_placement_fn` that returns None or `Shard(0)` changes nothing")
def shard_on_rows(fsdp):
    model, reference = seeded(MLP), seeded(MLP)
    fsdp.fully_shard(model, mesh=mesh(), shard_placement_fn=lambda p: Shard(0) if p.ndim == 2 else None)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(found), wanted)


@case(WRAP, "`share_comm_ctx` takes several roots (pipeline stages)")
def share_comm_ctx(fsdp):
    stages = [fsdp.fully_shard(seeded(MLP, seed), mesh=mesh()) for seed in (0, 1)]
    fsdp.share_comm_ctx(stages)
    x = torch.randn(4, 8)
    stages[1](stages[0](x)).sum().backward()
    assert all(p.grad is not None for stage in stages for p in stage.parameters())


@case(WRAP, "`share_comm_ctx` refuses what is not wrapped", fsdp2=Raises(ValueError, "FSDPModule"))
def share_comm_ctx_plain(fsdp):
    fsdp.share_comm_ctx([MLP()])


@case(
    WRAP,
    "an `int` for `reshard_after_forward` must divide the ranks",
    fsdp2=Raises(ValueError, "factor|divi"),
)
def odd_reshard(fsdp):
    fsdp.fully_shard(MLP(), mesh=mesh(), reshard_after_forward=3)


@case(WRAP, "`reshard_after_forward` of another type is refused", fsdp2=Raises(ValueError, "reshard_after"))
def text_reshard(fsdp):
    fsdp.fully_shard(MLP(), mesh=mesh(), reshard_after_forward="yes")


@case(WRAP, "`dp_mesh_dims`: DTensor parameters on one mesh of all parallelisms", ranks=4, since=(2, 13))
def spmd_mesh(fsdp):
    over = mesh(2, 2, names=("dp", "tp"))
    model = distribute_module(seeded(MLP), over)
    fsdp.fully_shard(model, mesh=over, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
    wanted = seeded(MLP)
    for found, p in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(full(found), p)


@case(WRAP, "`dp_mesh_dims` with two dimensions to shard over: they are flattened", ranks=4, since=(2, 13))
def spmd_mesh_flattened(fsdp):
    over = mesh(2, 2, names=("dp", "cp"))
    plain, dims = distribute_module(seeded(MLP), over), fsdp.DataParallelMeshDims(shard=("dp", "cp"))
    model = fsdp.fully_shard(plain, mesh=over, dp_mesh_dims=dims)
    for found, p in zip(model.parameters(), seeded(MLP).parameters(), strict=True):
        assert torch.equal(full(found), p)
        held = torch.tensor(found.to_local().numel())
        torch.distributed.all_reduce(held)
        assert held.item() == p.numel()


@case(
    WRAP,
    "`dp_mesh_dims` with replicas only",
    ours=Raises(ValueError, "no shard dimension"),
    note="use `DistributedDataParallel`",
    since=(2, 13),
)
def spmd_mesh_replicas(fsdp):
    over = mesh(world(), names=("dp",))
    model, reference = distribute_module(seeded(MLP), over), seeded(MLP)
    fsdp.fully_shard(model, mesh=over, dp_mesh_dims=fsdp.DataParallelMeshDims(replicate="dp"))
    for found, p in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(found), p)


@case(
    WRAP,
    "`dp_mesh_dims` that name no dimension of the mesh",
    fsdp2=Raises(ValueError, "nothere"),
    since=(2, 13),
)
def spmd_mesh_unknown(fsdp):
    over = mesh(world(), names=("dp",))
    fsdp.fully_shard(MLP(), mesh=over, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="nothere"))

"""Every optimizer on every layout that torch's own `fully_shard` and DDP make, against one process: the same bits.

`pytest -s` on this file prints the table of block-optim's page on FSDP2.
"""

import functools
import warnings
from typing import Any

import pytest
import torch
from runs import cut_twice, full, put, same
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from block_optim import SOAP, AdamW, AdamW8bit, Muon, Param, Shampoo, mixed_optimizer_for
from block_optim.core.grid import Grid, block_for
from layout_planner import Elements, Tile
from ragged_shard import RaggedShard, held_boxes
from ragged_shard.testing import on_ranks, run_ranks

WIDTH = 12
EXPERTS = {"experts.up": Tile(1, 256), "experts.down": Tile(1, 256)}  # cut between first and last dimension
MESH_BLOCKS = {  # `down` has 48 columns that two ranks share
    "tensor parallel": {"down.weight": Tile(1, 24)},
    "experts by Shard(1)": EXPERTS,
    "expert parallel": EXPERTS,
}
MATRICES = ("up.weight", "down.weight", "experts.up", "experts.down")


class Experts(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x):
        return torch.einsum("bef,efd->bd", torch.einsum("bd,edf->bef", x, self.up).relu(), self.down)


class Model(nn.Module):
    """Uneven shards (31 rows), empty ones (1 row), stacks, a tied head and a frozen parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(31, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.experts = Experts(4)
        self.gate = nn.Linear(WIDTH, 1)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.down(self.up(self.norm(x)).relu()) + self.frozen(x)
        return self.head(x + self.experts(x)) * self.gate(x)


def plain(model):
    return model


def rows(model, **options):
    for unit in (model.up, model.experts, model):
        if not isinstance(unit, FSDPModule):
            fully_shard(unit, **options)
    return model


def cpu_offload(model):
    return rows(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hsdp(model):
    return rows(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def expert_columns(model):
    fully_shard(model.experts, shard_placement_fn=lambda p: Shard(1))
    return rows(model)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return rows(model, mesh=mesh["data"])


def expert_parallel(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    for name, weight in list(model.experts.named_parameters()):
        cut = distribute_tensor(weight.detach(), mesh["expert"], [Shard(0)])
        setattr(model.experts, name, nn.Parameter(cut))
    fully_shard(model.experts, mesh=mesh["data"], shard_placement_fn=lambda p: Shard(1))
    return rows(model, mesh=mesh["data"])


def replicated(model):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    distribute_module(model, mesh)
    model.head.weight = model.embedding.weight
    return model


LAYOUTS = {
    "Shard(0)": (rows, (1, 2, 3, 4)),
    "CPUOffloadPolicy": (cpu_offload, (3,)),
    "experts by Shard(1)": (expert_columns, (3,)),
    "HSDP": (hsdp, (4,)),
    "tensor parallel": (tensor_parallel, (4,)),
    "expert parallel": (expert_parallel, (4,)),
    "DDP": (plain, (2, 3, 4)),
    "Replicate": (replicated, (3,)),
}


def named(model):
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


MATRICES_ONLY: dict[str, Any] = {"min_8bit_numel": 1, "quantize": lambda name, p: p.ndim > 1}


def narrow(model, layout):
    """8-bit AdamW with its default block; in one process, with those that follow the mesh in the layout."""
    chosen = {} if torch.distributed.is_initialized() else MESH_BLOCKS.get(layout, {})
    groups = [{"params": [(n, p)], "block": chosen.get(n, "auto")} for n, p in named(model)]
    return AdamW8bit(groups, lr=0.02, **MATRICES_ONLY)


def divided(layout):
    """Options under which ranks that hold plain parameters alike divide the work."""
    if layout != "DDP" or not torch.distributed.is_initialized():
        return {}
    return {"replicate_mesh": init_device_mesh("cpu", (torch.distributed.get_world_size(),))}


def muon(model, layout, normuon=False):
    """NorMuon refuses the parameter that tensor parallelism cuts inside rows."""
    refused = {"down.weight"} if normuon and layout == "tensor parallel" else set()
    matrices = [(n, p) for n, p in named(model) if n in {*MATRICES} - refused]
    return Muon(matrices, lr=0.02, normuon=normuon, **divided(layout))


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model, layout: AdamW(named(model), lr=0.02),
    "AdamW8bit": narrow,
    "Muon": muon,
    "NorMuon": functools.partial(muon, normuon=True),
    "Shampoo": lambda model, layout: Shampoo(
        named(model), lr=0.02, max_preconditioner_dim=16, **divided(layout)
    ),
    "SOAP": lambda model, layout: SOAP(named(model), lr=0.02, max_preconditioner_dim=16, **divided(layout)),
    "mixed_optimizer_for": lambda model, layout: mixed_optimizer_for(
        model, lr=0.02, muon=divided(layout), verbose=False
    ),
}


def like(value, param):
    """A full tensor with a parameter's placements."""
    if not isinstance(param, DTensor):
        return value.clone()
    mesh, placements = param.device_mesh, param.placements
    boxes = held_boxes(param.shape, mesh.shape, placements, mesh.get_coordinate() or ())
    assert len(boxes) <= 1
    local = value.new_empty(param.to_local().shape)
    for offsets, sizes in boxes:
        index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        local.copy_(value[index])
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
    )


@functools.cache
def gradients():
    """Those of three steps, by name; the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    named = dict(Model().named_parameters())
    return [{n: torch.randn(p.shape, generator=generator) for n, p in named.items()} for _ in range(3)]


def trained(layout, kind):
    """The parameters after three steps."""
    model = (LAYOUTS[layout][0] if torch.distributed.is_initialized() else plain)(Model())
    optimizer = OPTIMIZERS[kind](model, layout)
    for grads in gradients():
        for name, p in named(model):
            p.grad = like(grads[name], p)
        optimizer.step()
    return {name: full(p.detach()) for name, p in model.named_parameters()}


CUT_TWICE = {"tensor parallel": [cut_twice], "expert parallel": [cut_twice]}
USUAL = (("Shard(0)", 3), ("tensor parallel", 4))


def all_trained(layout):
    warnings.simplefilter("ignore")
    return {kind: trained(layout, kind) for kind in OPTIMIZERS}


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(
            layout, n, marks=[*CUT_TWICE.get(layout, []), *[pytest.mark.long] * ((layout, n) not in USUAL)]
        )
        for layout, (_, sizes) in LAYOUTS.items()
        for n in sizes
    ],
)
def test_on_torchs_fully_shard_every_optimizer_has_the_bits_of_one_process(layout, world_size):
    on_ranks = run_ranks(world_size, all_trained, layout)
    for kind in OPTIMIZERS:
        expected = trained(layout, kind)
        for number, result in enumerate(on_ranks):
            different = [n for n, p in expected.items() if not torch.equal(p, result[kind][n])]
            assert not different, (kind, number, different)
        print(f"\n| {kind} | {layout} | {world_size} ranks | equal |", end="")


CHOSEN: dict[Any, Any] = {  # of tensors on three ranks, by shape and placement
    ((1000, 768), Shard(0)): Tile(1, 256),
    ((7, 5000), Shard(0)): Tile(1, 256),
    ((4, 768, 100), Shard(1)): Tile(1, 256),
    ((768, 3 * 500), Shard(1)): Tile(1, 250),
    ((64, 3 * 521), Shard(-1)): Tile(1, 521),  # prime, and more than 256
    ((64, 13), Shard(1)): Tile(1, 5),
    ((64, 3, 7, 7), Shard(0)): Elements(147),
    ((3 * 640,), Shard(0)): Elements(160),
    ((1000, 768), Replicate()): Tile(1, 256),
    ((900, 768), RaggedShard((0,), (1, 0, 2))): Tile(1, 256),
    ((64, 48, 3), Shard(0)): Elements(144),
    ((64, 48, 3), Shard(1)): Tile(1, 256),
    ((1920,), Replicate()): Elements(256),
}


def any_tensor(name, param):
    return True


@on_ranks(3)
def test_auto_takes_blocks_that_no_share_cuts_from_global_shapes():
    mesh = init_device_mesh("cpu", (3,))

    def made(shape, placement):
        return nn.Parameter(put(torch.zeros(shape), mesh, [placement]))

    result = []
    for shape, placement in CHOSEN:
        optimizer = AdamW8bit([("w", p := made(shape, placement))], min_8bit_numel=1, quantize=any_tensor)
        p.grad = p.detach().clone()
        optimizer.step()
        scales = optimizer.state[p]["exp_avg_scale"]
        result.append((block_for(Param(p, "w"), optimizer.param_groups[0]["block"]), tuple(scales.shape)))
    for ((shape, _), block), (chosen, scales) in zip(CHOSEN.items(), result, strict=True):
        assert chosen == block, shape
        assert scales == Grid(shape, block).scale_shape


@pytest.mark.parametrize("broadcast", [False, True])
@on_ranks(3)
def test_a_full_state_dict_of_8_bit_adamw_is_set_on_rows_that_ranks_do_not_divide(broadcast):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(256, 130))
    optimizer = AdamW8bit(model.named_parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    expected = {k: full(v).clone() for k, v in optimizer.state[model.weight].items()}
    optimizer.state.clear()
    given = saved if not broadcast or torch.distributed.get_rank() == 0 else {}
    set_optimizer_state_dict(model, optimizer, given, options=options)
    same({k: full(v) for k, v in optimizer.state[model.weight].items()}, expected)

"""Expert parallelism, and units whose parameters lie on several meshes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from experts import apply_expert_parallel
from harness import RANKS, Outcome, case, counts, rows_of, train
from tensor_parallel import apply_tensor_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import loss_parallel

from fsdp_runtime.train.model import ModelConfig, SwiGLU, Transformer, init_parameter
from ragged_shard.testing import rank_mesh

ROWS = Shard(0)
LAYOUT = "Experts and dense parameters in one unit, as torchtitan lays them out"
SCALING = "Gradient scaling as trainers set it"
REPLICAS = "Replicas of dense parameters, of experts, of both"
ROUTING = "Shared, frozen and idle experts"
WITH_TP = "Experts beside tensor parallelism"


# -- a mixture of experts ----------------------------------------------------------------------------------------------


def transformer(
    experts: int, change: Callable[[Any], None] | None = None, kv_heads: int = 1
) -> Callable[[], nn.Module]:
    """Builds two layers with so many experts each; `change` gets each layer's block."""

    def build() -> nn.Module:
        config = ModelConfig(
            vocab_size=32, dim=16, num_layers=2, num_heads=2, num_kv_heads=kv_heads, ff_dim=24, num_experts=experts,
            tied=False,
        )  # fmt: skip
        model = Transformer(config)
        for block in model.blocks:
            if change is not None:
                change(block)
        generator = torch.Generator().manual_seed(0)
        for name, param in model.named_parameters():
            with torch.no_grad():
                init_parameter(config, name, param, generator)
                param.mul_(1.0 if "norm" in name else 10.0)
        return model

    return build


def tokens(step: int) -> torch.Tensor:
    return torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(step))


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token and the balancing loss, means over sequences."""
    logits, aux = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 0.01 * aux


@dataclass(frozen=True)
class Meshes:
    """The dense mesh, and of experts the mesh that cuts them and the axis that shares them out."""

    dense: DeviceMesh
    sparse: DeviceMesh
    ep: DeviceMesh


def meshes(ep: int, replicas: int = 1, expert_replicas: int = 1) -> Meshes:
    """Of all ranks, as torchtitan makes them: both from one world."""

    def made(*axes: tuple[str, int]) -> DeviceMesh:
        return rank_mesh(*tuple((size for _, size in axes)), names=tuple((name for name, _ in axes)))

    dense = made(("dp_replicate", replicas), ("fsdp", RANKS // replicas))
    sparse = made(("ep_replicate", expert_replicas), ("efsdp", RANKS // ep // expert_replicas), ("ep", ep))
    return Meshes(
        dense if replicas > 1 else dense["fsdp"],
        sparse["ep_replicate", "efsdp"] if expert_replicas > 1 else sparse["efsdp"],
        sparse["ep"],
    )


def placement_fn(over: Meshes, experts: set[nn.Parameter], placement: Shard) -> Callable[[nn.Parameter], Any]:
    """What torchtitan passes: a placement where nothing shares out experts, else torch's own objects with a mesh.

    On a torch without those ours gets the mesh itself.
    """
    result: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
    if over.ep.size() == 1:
        return lambda param: placement if param in experts else None
    if result is None:
        return lambda param: over.sparse if param in experts else None

    def info(mesh: DeviceMesh) -> Any:
        if mesh.ndim == 1:
            return _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    dense, sparse = info(over.dense), info(over.sparse)
    return lambda param: result(placement, sparse) if param in experts else result(Shard(0), dense)


def wrap_blocks(fsdp, model, over, *, placement=ROWS, apart=False, **options) -> list[Any]:
    """One unit a block, experts on a mesh of their own; `apart`: the layer with experts in a unit of its own."""
    if over.ep.size() > 1:
        experts = apply_expert_parallel(model, over.ep)
    else:
        experts = {p for p in model.parameters() if p.ndim == 3}
    options = {"mesh": over.dense, **options}
    inner = []
    for block in model.blocks:
        chosen = block.ff if apart else block
        inner.append(
            fsdp.fully_shard(chosen, shard_placement_fn=placement_fn(over, experts, placement), **options)
        )
        if apart:
            fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    return inner


def divide_nothing(model: nn.Module) -> None:
    """As torchtitan: losses are scaled instead. By sums, since gloo has not got what FSDP2 sends otherwise."""
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def train_experts(fsdp, build, wrap, **options) -> Outcome:
    share = rows_of(dist.get_rank(), RANKS)
    return train(fsdp, build, wrap, language_loss, batches=tokens, share=share, **options)


def counts_of(gathers: int, reductions: int, all_reduces: int = 1, layers: int = 2) -> dict[str, int]:
    """Collectives of a step: with these layers of shared-out experts, three all-to-alls forward and two backward each.

    All-reduces: one for the norm of all gradients that are cut over the same ranks, and those over replicas.
    """
    found = {"all_gather": gathers, "reduce_scatter": reductions, "all_reduce": all_reduces}
    return {**found, "all_to_all": 5 * layers} if layers else found


# -- changes of a block ------------------------------------------------------------------------------------------------


class WithShared(nn.Module):
    """A mixture of experts, and an expert that every token goes through."""

    def __init__(self, routed: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.routed, self.shared = routed, SwiGLU(config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found, aux = self.routed(x)
        return found + self.shared(x)[0], aux


def share_an_expert(block: Any) -> None:
    block.ff = WithShared(block.ff, ModelConfig(dim=16, num_heads=2, num_kv_heads=1, ff_dim=24))


def freeze_experts(block: Any) -> None:
    for name in ("w_gate", "w_up", "w_down"):
        getattr(block.ff, name).requires_grad_(False)


def idle(*which: int) -> Callable[[Any], None]:
    def change(block: Any) -> None:
        def away(module: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill(-1, torch.tensor(which), -1e9)

        block.ff.router.register_forward_hook(away)

    return change


# -- cases -------------------------------------------------------------------------------------------------------------


def enter(section, text, expected, *mesh, name, experts=4, change=None, factor=False, **options) -> None:
    """A case of a mixture of experts.

    Args:
        mesh: ranks of ep, replicas of dense parameters, replicas of experts.
        factor: gradients of units with experts are sums divided by the number of ranks, as in transformers. Else losses
            are scaled and nothing is divided, as in torchtitan.
        options: of `wrap_blocks`.
    """

    @case(section, text, counts=expected, name=name)
    def entered(fsdp: Any) -> Outcome:
        def wrap(fsdp: Any, model: Any) -> None:
            units = wrap_blocks(fsdp, model, meshes(*mesh), **options)
            if not factor:
                divide_nothing(model)
                return
            for unit in units:
                unit.set_gradient_divide_factor(float(RANKS))
                unit.set_force_sum_reduction_for_comms(True)

        return train_experts(fsdp, transformer(experts, change), wrap, scale=1.0 if factor else 1 / RANKS)


# Two blocks and a root; again in backward but for the root. With ep 2 a block has two meshes that cut something.
LAID_OUT = {1: counts_of(5, 3, layers=0), 2: counts_of(9, 5), 4: counts_of(5, 3)}
for _ep, _experts in ((1, 2), (1, 4), (1, 6), (2, 2), (2, 4), (2, 6), (4, 4)):
    _balance, _name = Shard(1) if _experts < RANKS else ROWS, f"titan_{_ep}_{_experts}"
    _text = f"ep {_ep}, {_experts} experts, `{_balance}`"
    enter(LAYOUT, _text, LAID_OUT[_ep], _ep, name=_name, experts=_experts, placement=_balance)
enter(
    LAYOUT, "ep 2, 6 experts, parameters kept after forward", counts_of(5, 5), 2, name="kept_after_forward", experts=6,
    reshard_after_forward=False,
)  # fmt: skip


@case(SCALING, "divide factor 1.0 on all units, losses scaled, without forced sums", counts=counts_of(9, 5))
def factor_one(fsdp: Any) -> Outcome:
    def wrap(fsdp: Any, model: Any) -> None:
        wrap_blocks(fsdp, model, meshes(2))
        for module in (*model.blocks, model):
            module.set_gradient_divide_factor(1.0)

    return train_experts(fsdp, transformer(4), wrap, scale=1 / RANKS)


for _ep, _reductions in ((2, 2), (4, 1)):
    enter(
        SCALING, f"factor {RANKS} and forced sums on units with experts, efsdp {RANKS // _ep}",
        counts_of(4 * _reductions + 5, 2 * _reductions + 3), _ep, name=f"factor_with_ep{_ep}", change=share_an_expert,
        factor=True, apart=True,
    )  # fmt: skip

for _text, _mesh, _counts in (
    ("dense (replicate 2, fsdp 2); experts efsdp 2, ep 2", (2, 2, 1), counts_of(9, 5, 3 + 2)),
    ("dense fsdp 4; experts (replicate 2, efsdp 1), ep 2", (2, 1, 2), counts_of(5, 3, 2 + 2)),
    ("dense (replicate 2, fsdp 2); experts (replicate 2, efsdp 1), ep 2", (2, 2, 2), counts_of(5, 3, 5 + 1)),
):
    enter(REPLICAS, _text, _counts, *_mesh, name=f"replicas_{_mesh}", factor=True)

for _text, _change, _counts in (
    ("a shared expert for all tokens", share_an_expert, counts_of(9, 5)),
    ("frozen experts: they are gathered, and not reduced", freeze_experts, counts_of(9, 3)),
    ("an expert that no token chooses", idle(2), counts_of(9, 5)),
    ("a rank of ep whose experts get no token", idle(2, 3), counts_of(9, 5)),
):
    enter(ROUTING, _text, _counts, 2, name=_text, change=_change)


@case(ROUTING, "the norm by `fsdp_runtime.clip_grad_norm_`, for FSDP2 by torch's", counts=counts_of(9, 5))
def clipped_by_ours(fsdp: Any) -> Outcome:
    def wrap(fsdp: Any, model: Any) -> None:
        wrap_blocks(fsdp, model, meshes(2))
        divide_nothing(model)

    clip = getattr(fsdp, "clip_grad_norm_", None)
    return train_experts(fsdp, transformer(4), wrap, scale=1 / RANKS, clip_with=clip)


# -- with tensor parallelism -------------------------------------------------------------------------------------------


def next_token(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Cross entropy alone: the balancing loss of a part of a sequence is another one."""
    return nn.functional.cross_entropy(model(batch[:, :-2])[0].flatten(0, 1), batch[:, 1:-1].flatten())


def enter_tp(ep: int, expected: dict[str, int]) -> None:
    """Matrices cut by tp 2 and over fsdp 2; tokens between them, and experts, divided over all ranks."""

    @case(
        WITH_TP, f"tp 2 x fsdp 2; experts efsdp {RANKS // ep}, ep {ep}", counts=expected, name=f"tp2_ep{ep}"
    )
    def entered(fsdp: Any) -> Outcome:
        dense = rank_mesh(2, 2, names=("fsdp", "tp"))
        sparse = rank_mesh(RANKS // ep, ep, names=("efsdp", "ep"))

        def wrap(fsdp: Any, model: Any) -> None:
            apply_tensor_parallel(model, dense["tp"])
            over = Meshes(dense["fsdp"], sparse["efsdp"], sparse["ep"])
            for unit in wrap_blocks(fsdp, model, over):
                unit.set_gradient_divide_factor(2.0)  # experts get the gradients of both readers
                unit.set_force_sum_reduction_for_comms(True)

        share = rows_of(dense.get_local_rank("fsdp"), 2)
        with loss_parallel():
            return train(fsdp, transformer(4, kv_heads=2), wrap, next_token, batches=tokens, share=share)


enter_tp(2, counts(15, 11, 12, 10))
enter_tp(4, counts(11, 9, 12, 10))

"""Refusals: each call raises this error, which names key and remedy, on every rank; a refused unit is as before.

Each number of ranks is one launch. Further refusals: `conformance`, `train/test_train_refusals.py`.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extended_tensors import Halved, Wrapper, extend
from runtime_helpers import PolicyOf215, loss_of, mesh_of, seeded, shard, step_of, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dbuffer.encodings import BlockFP8
from fsdp_runtime import QuantizationPolicy, block_policies, fully_shard, iter_full_params
from fsdp_runtime._torch_compat import ShardPlacementResult
from fsdp_runtime.token_loss import TokenLoss
from layout_planner import Rows, Tile
from ragged_shard._torch_compat import SUBCLASSES_DTENSOR
from ragged_shard.testing import rank_mesh, run_ranks

Call = Callable[[], object]
FP8, IN_BF16 = (QuantizationPolicy(weights=BlockFP8((128, 128))), QuantizationPolicy(gradients="bf16"))


def wrap(model: Any, **options: Any) -> None:
    """Shard a model, which a refusal must leave as it was."""

    def state() -> list[tuple[Any, ...]]:
        return [
            (type(each), [id(p) for p in each._parameters.values()], set(each.__dict__), len(each._forward_hooks),
             len(each._forward_pre_hooks), len(each._state_dict_hooks))
            for each in model.modules()
        ]  # fmt: skip

    before = state()
    try:
        fully_shard(model, **options)
    except Exception:
        assert state() == before, "a refusal has changed the model"
        raise


def linear(weight: torch.Tensor | None = None, **options: Any) -> nn.Sequential:
    layer = nn.Linear(8, 8, **options)
    if weight is not None:
        layer.weight = nn.Parameter(weight)
    return nn.Sequential(layer)


def double_norm() -> nn.Module:
    model = seeded(blocks=1)
    model.norm = model.norm.double()
    return model


def planner_fails() -> None:
    """Around a unit that is gathered, and with a parameter that is tied to it."""
    model = seeded(tied=True)
    fully_shard(model.embed).unshard()
    wrap(model, planner=lambda tensors, ranks, *, align: 1 // 0)


def finalizes_late() -> None:
    shard(seeded()).finalize_backward()


def finalizes_a_block() -> None:
    shard(seeded()).blocks[0].set_manual_backward_finalization(True)


def dtype_by_parameter() -> None:
    wrap(nn.Linear(2, 2), mp_policy=PolicyOf215(torch.bfloat16, param_dtype_override_fn=lambda p: torch.half))


def no_grad_dtype() -> None:
    model = nn.Linear(2, 2)
    model.bias.grad_dtype = None
    wrap(model)


# -- tensor subclasses -------------------------------------------------------------------------------------------------


class Unmarked(Wrapper):
    """A subclass without the two methods."""


class Lost(Halved):
    """Made by neither way: its ops give plain tensors."""

    @classmethod
    def __tensor_unflatten__(cls, tensors, log, size, stride):
        return tensors["inner"]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return made.inner if func is torch.ops.aten.new_zeros.default else made


class TwoInside(Halved):
    def __tensor_flatten__(self):
        return ["inner", "scale"], None


class FailsOnRank1(Halved):
    def fsdp_pre_all_gather(self, mesh):
        if mesh.get_local_rank() == 1:
            raise OverflowError("no such scale")
        return super().fsdp_pre_all_gather(mesh)


def extended(kind: Any, **options: Any) -> None:
    wrap(linear(kind(torch.randn(8, 8))), **options)


def keeps_subclasses() -> None:
    fully_shard(extend(nn.Sequential(nn.Linear(8, 8)), Halved)).set_keep_unsharded_storage(True)


def first_gather_fails() -> None:
    model = extend(nn.Sequential(nn.Linear(8, 8)), FailsOnRank1)
    fully_shard(model)
    model(torch.randn(2, 8))


# -- steps -------------------------------------------------------------------------------------------------------------


def optimizer_between_passes() -> Call:
    model = shard(seeded())
    loss = loss_of(model, tokens())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    return optimizer.step


def unfrozen_while_gradients_wait() -> Call:
    model = shard(seeded())
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    model.set_requires_gradient_sync(False)
    loss_of(model, tokens()).backward()
    model.blocks[0].weight.requires_grad_(True)
    return lambda: loss_of(model, tokens()).backward()


def full_optimizer_states() -> Call:
    model, plain = shard(seeded()), seeded()
    optimizer, theirs = (torch.optim.AdamW(each.parameters()) for each in (model, plain))
    step_of(plain, theirs)
    states = get_optimizer_state_dict(plain, theirs)
    set_optimizer_state_dict(model, optimizer, states, options=StateDictOptions(full_state_dict=True))
    return lambda: step_of(model, optimizer)


def trains_on_some_ranks() -> Call:
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")
    model = shard(seeded(), mesh=mesh)
    model.blocks[1].bias.requires_grad_(dist.get_rank() != 1)
    return lambda: loss_of(model, tokens())


def skippable_alone() -> object:
    model: Any = fully_shard(nn.Linear(3, 3), skippable=True)
    return model(torch.ones(1, 3))


# -- the loss by tokens ------------------------------------------------------------------------------------------------


def late_unit_averages() -> Call:
    model = seeded()
    for unit in model.blocks:
        fully_shard(unit)
    loss = TokenLoss(model)
    fully_shard(model)
    return lambda: loss.step([1])


def other_divide_factor() -> Call:
    model = shard(seeded())
    loss = TokenLoss(model)
    loss.step([1])
    model.set_gradient_divide_factor(3.0)
    return lambda: loss.step([1])


# -- meshes of four ranks ----------------------------------------------------------------------------------------------


def chosen(choose: Callable[[DeviceMesh, int], Any]) -> None:
    """Weights on what is chosen from the mesh with replicas and this rank's number, or on the mesh of all."""
    hybrid = rank_mesh(2, 2, names=("copies", "cut"))
    placed = lambda param: choose(hybrid, dist.get_rank()) if param.ndim == 2 else None  # noqa: E731
    wrap(nn.Linear(16, 16), mesh=rank_mesh(4, names=("fsdp",)), shard_placement_fn=placed)


def another_axis(hybrid: DeviceMesh, rank: int) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    return ShardPlacementResult(None, FSDPMeshInfo(hybrid, shard_mesh_dim=1))


def names_differ() -> None:
    """Ranks that do not agree on the names of axes; every rank makes both meshes."""
    other = rank_mesh(2, 2, names=("copies", "other"))
    chosen(lambda hybrid, rank: hybrid if rank else other)


def cut_twice_over_one_mesh() -> None:
    world, model = rank_mesh(2, 2, names=("efsdp", "ep")), nn.Linear(6, 8)
    cut = distribute_tensor(model.weight.detach(), world["ep"], [Shard(0)], src_data_rank=None)
    model.weight = nn.Parameter(cut)
    mesh = rank_mesh(4, names=("fsdp",))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: world["ep"] if p.ndim == 2 else None)


def tied_on_two_meshes() -> Call:
    model = seeded(tied=True)
    fully_shard(model.embed, mesh=rank_mesh(4))
    return lambda: fully_shard(model, mesh=mesh_of(2, 2))


# A call that raises, or that returns calls which raise; the error; a pattern of its message.
Row = tuple[str, Callable[[], Any], type[Exception] | tuple[type[Exception], ...], str]
REFUSED: dict[int, list[Row]] = {
    1: [
        ("a pattern", lambda: block_policies.by_pattern({"(": Rows(1)}), ValueError, r"'\(' is not a regular expr"),
        ("no blocks", lambda: block_policies.declared_by(torch.optim.SGD), TypeError, "SGD.* declares no blocks"),
        ("a planner", lambda: wrap(linear(), planner="best"), TypeError, "planner is 'best'.*layout_planner.plan"),
        ("quantized by name", lambda: wrap(linear(), quantization_policy="bf16"), TypeError, "QuantizationPolicy"),
        ("gradients of fp64", lambda: wrap(double_norm(), quantization_policy=IN_BF16), ValueError,
         r"norm\.weight of torch\.float64: gradients in torch\.float64"),
        ("weights of fp64", lambda: wrap(linear(dtype=torch.float64), quantization_policy=FP8), ValueError,
         r"0\.weight was selected: torch\.float64 cannot be quantized"),
        ("norm_type", lambda: shard(seeded()).clip_grad_norm_(1.0, 0.0), ValueError, r"norm_type is 0\.0"),
        ("subclasses that stay", keeps_subclasses, NotImplementedError, "set_keep_unsharded_storage: "),
        ("dtype by parameter", dtype_by_parameter, ValueError, r"gave torch\.float16 for parameter weight"),
        ("grad_dtype", no_grad_dtype, ValueError, "parameter bias has grad_dtype None"),
    ],
    2: [
        ("a number", lambda: wrap(linear(), block_policy=lambda name, p: 3 if p.ndim == 2 else None), ValueError,
         r"0\.weight.*3"),
        ("tiles of a vector", lambda: wrap(linear(), block_policy=lambda name, p: Tile(2, 2)), ValueError, r"0\.bias"),
        ("a block", lambda: wrap(linear(), block_policy=Rows(2)), (TypeError, ValueError), "block_policy"),
        ("a policy that raises", lambda: wrap(linear(), block_policy=lambda name, p: 1 // 0),
         (ZeroDivisionError, ValueError), ""),
        ("a planner that raises", planner_fails, ZeroDivisionError, ""),
        ("the second group", lambda: wrap(double_norm(), block_policy=lambda name, p: 3 if "norm.b" in name else None),
         ValueError, r"norm\.bias.*3"),
        ("complex", lambda: wrap(linear(torch.ones(8, 8, dtype=torch.complex64))), (TypeError, ValueError),
         r"0\.weight.*complex64"),
        ("shapes differ", lambda: wrap(linear(torch.ones(8 + dist.get_rank(), 8))), ValueError, r"0\.weight"),
        ("blocks differ", lambda: wrap(linear(), block_policy=block_policies.rows(2 + dist.get_rank())), ValueError,
         r"0\.(weight|bias)"),
        ("mp_policy", lambda: wrap(linear(), mp_policy=torch.bfloat16), (TypeError, ValueError), "mp_policy"),
        ("mesh", lambda: wrap(linear(), mesh=dist.group.WORLD), (TypeError, ValueError), "mesh"),
        ("ignored by name", lambda: wrap(linear(), ignored_params={"weight"}), (TypeError, ValueError),
         "ignored_params"),
        ("two inside", lambda: extended(TwoInside), NotImplementedError,
         r"0\.weight is a TwoInside of 2 tensors \(inner, scale\)"),
        ("unmarked", lambda: extended(Unmarked), NotImplementedError, "0.weight is a Unmarked without fsdp_pre_all_g"),
        ("lost", lambda: extended(Lost), NotImplementedError,
         r"is a Lost that cannot be made .* by __tensor_unflatten__\(tensors, log, size, stride\).* nor by new_zeros"),
        ("selected subclass", lambda: extended(Halved, quantization_policy=FP8), ValueError, "selected, but is a Halv"),
        ("finalize", finalizes_late, RuntimeError, r"set_manual_backward_finalization\(True\) before forward"),
        ("finalize a block", finalizes_a_block, RuntimeError, "must be called on the root module"),
        ("exports differ", lambda: iter_full_params(shard(seeded()), ranks=(dist.get_rank(),)), ValueError,
         "ranks do not agree on ranks"),
        ("bucket", lambda: iter_full_params(shard(seeded()), bucket_bytes=0), ValueError, "bucket_bytes is 0"),
        ("no such rank", lambda: iter_full_params(shard(seeded()), ranks=(5,)), ValueError, r"ranks is \(5,\)"),
        ("skippable alone", skippable_alone, RuntimeError, "Linear is skippable: .* shard it without skippable=True"),
        ("optimizer in between", optimizer_between_passes, RuntimeError,
         "SGD was built between forward and backward: .* 'embed.weight' first"),
        *([("full states", full_optimizer_states, ValueError, "broadcast_from_rank0=True")] * SUBCLASSES_DTENSOR),
        ("unfrozen", unfrozen_while_gradients_wait, RuntimeError,
         r"weight in blocks\.0 was unfrozen while gradients of other param"),
        ("a gather of one rank", first_gather_fails, (RuntimeError, OverflowError), "no such scale"),
    ],
    3: [
        ("late unit", late_unit_averages, RuntimeError, "Body: .*divide factor is None.*after the last"),
        ("divide factor", other_divide_factor, RuntimeError, r"divide factor is 3\.0"),
        ("trained differs", trains_on_some_ranks, RuntimeError,
         r"blocks\.1, which trains (weight, bias.*blocks\.1, which trains weight[;,]|weight[;,].*trains weight, bias)"),
        ("no unit", lambda: TokenLoss(seeded()), ValueError, "units are sharded over 0 sets of ranks"),
    ],
    4: [
        ("placement", lambda: chosen(lambda *_: Replicate()), ValueError, "gave Replicate.* for weight; expected None"),
        ("dim", lambda: chosen(lambda *_: Shard(2)), ValueError, "gave S.*2.* for weight, which has 2 dimensions"),
        ("three axes", lambda: chosen(lambda *_: rank_mesh(2, 2, 1, names=("a", "b", "c"))), ValueError,
         "for weight: fully_shard expects a 1D or 2D"),
        ("no names", lambda: chosen(lambda *_: rank_mesh(2, 2)), ValueError, "without names"),
        # A mesh without rank 3: it says so itself, and the others hear of it.
        ("three ranks", lambda: chosen(lambda *_: DeviceMesh("cpu", [0, 1, 2])), ValueError,
         "rank 3 is not in|shard_placement_fn on rank 3: .*rank 3"),
        ("axes differ", names_differ, ValueError, "do not agree on the mesh of weight"),
        ("meshes differ", lambda: chosen(lambda mesh, rank: mesh if rank == 2 else None), ValueError,
         "do not agree on the mesh of weight"),
        ("cut twice", cut_twice_over_one_mesh, ValueError, "weight is already a DTensor on the mesh"),
        ("tied", tied_on_two_meshes, ValueError, r"head\.weight was cut over .* by the unit Embedding.*same mesh"),
        ("four of two", lambda: wrap(nn.Linear(16, 16), mesh=rank_mesh(4), reshard_after_forward=4,
         shard_placement_fn=lambda p: rank_mesh(2, 2, names=("copies", "cut")) if p.ndim == 1 else None),
         ValueError, "reshard_after_forward=4: parameter bias is cut over 2 ranks"),
        *([("axis", lambda: chosen(another_axis), ValueError, "weight: mesh_info cuts over axis 1 .* copies over None"),
           ("mesh_info", lambda: chosen(lambda *_: ShardPlacementResult(None, 3)), TypeError, "mesh_info is a int"),
           ] if ShardPlacementResult is not None else []),
    ],
}  # fmt: skip


def problem_of(call: Call, error: Any, words: str) -> str:
    """How the call's error differs from the expected one; "" if it does not."""
    try:
        result = call()
    except Exception as raised:
        fits = isinstance(raised, error) and re.search(words, str(raised), re.DOTALL)
        return "" if fits else f"{type(raised).__name__}: {raised}"
    calls = result if isinstance(result, tuple) else (result,)
    if result is None or not all(callable(each) for each in calls):
        return "is not refused"
    return "; ".join(filter(None, (problem_of(each, error, words) for each in calls)))


def problems(ranks: int) -> list[str]:
    """On a rank: rows whose call is not refused as it must be."""
    problems = []
    for name, call, error, words in REFUSED[ranks]:
        if problem := problem_of(call, error, words):
            problems.append(f"{name}: {problem}")
        dist.barrier()
    return problems


@pytest.mark.parametrize("number", REFUSED)
def test_every_call_is_refused_by_name_on_every_rank(number: int) -> None:
    assert run_ranks(number, problems, number, seed=0) == [[]] * number

"""Who runs a program: one process with plain modules, this runtime, FSDP2, or this runtime on the simulated device."""

import dataclasses
import gc
from datetime import timedelta
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import block_optim
import fsdp_runtime
from dbuffer.encodings import BlockFP8, BlockInt8, BlockNF4, RowRun
from fsdp_runtime import MixedPrecisionPolicy, QuantizationPolicy, block_policies
from fsdp_runtime.memory import gathered_memory, unit_memory
from fsdp_runtime.quantization import matrices_only
from ragged_shard.testing import rank_mesh

from .expert_parallel import Bank, is_divided
from .layers import Packed, Subclass, TwoForwards, Wrapped
from .models import Model
from .optimizer_actions import TORCH
from .program import Program, Unit
from .world import TIMEOUT

DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16
POLICIES = {
    "": None,
    "rows": block_policies.rows(4),
    "tiles": block_policies.tiles(3, 3),
    "whole": block_policies.whole(),
    "adamw8bit": block_optim.AdamW8bit.block_policy(min_8bit_numel=16),
}
FAILED = tuple(("fail_in_backward", layer, False) for layer in range(8))
# A policy, and the relative error that it allows against one process that has none.
PRECISIONS: dict[str, tuple[MixedPrecisionPolicy, float]] = {
    "": (MixedPrecisionPolicy(), 1e-9),
    "bf16": (MixedPrecisionPolicy(HALF, SINGLE), 0.2),
    "fp16": (MixedPrecisionPolicy(torch.float16, SINGLE), 0.1),
    "mixed": (MixedPrecisionPolicy(SINGLE, DOUBLE), 1e-3),
    "reduce32": (MixedPrecisionPolicy(reduce_dtype=SINGLE), 1e-4),
    "output": (MixedPrecisionPolicy(SINGLE, SINGLE, output_dtype=DOUBLE), 1e-3),
    "autocast": (MixedPrecisionPolicy(), 0.05),
}
# A policy, and the relative error that it allows against one process that computes with weights read back from their
# codes: rounding moves a value to the next code now and then.
QUANTIZED: dict[str, tuple[QuantizationPolicy | None, float]] = {
    "": (None, 0.0),
    "fp8": (QuantizationPolicy(weights=BlockFP8((128, 128))), 0.1),
    "int8": (QuantizationPolicy(weights=BlockInt8(8)), 0.05),
    "int8 both": (
        QuantizationPolicy(weights=BlockInt8(8), gradients=BlockInt8(8, rounding="stochastic")), 0.1,
    ),
    "bf16": (QuantizationPolicy(gradients="bf16"), 0.1),
    "nf4": (QuantizationPolicy(at_rest=BlockNF4(64), select=lambda name, param, module: "frozen.w" in name), 0.02),
}  # fmt: skip
# A constructor from named parameters, the dtype of the model, and the relative error that it allows.
OPTIMIZERS: dict[str, tuple[Any, torch.dtype, float]] = {
    "sgd": (lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9), DOUBLE, 0.0),
    "adamw": (lambda named: torch.optim.AdamW(named, lr=0.01, eps=1e-3), DOUBLE, 0.0),
    "block adamw": (lambda named: block_optim.AdamW(named, lr=0.01, eps=1e-3, weight_decay=0.1), DOUBLE, 0.0),
    "adamw8bit": (
        lambda named: block_optim.AdamW8bit(named, lr=0.01, eps=1e-3, min_8bit_numel=16),
        SINGLE,
        3e-3,
    ),
    # Newton-Schulz steps, in bf16, enlarge what rounding leaves in directions that a gradient does not have.
    "muon": (lambda named: _muon(named), SINGLE, 0.05),
    "shampoo": (lambda named: block_optim.Shampoo(named, lr=0.01), DOUBLE, 1e-5),
    "soap": (lambda named: block_optim.SOAP(named, lr=0.01), DOUBLE, 1e-5),
    **{name: (make, DOUBLE, 0.0) for name, make in TORCH.items()},
}


def _muon(named: list[tuple[str, nn.Parameter]]) -> block_optim.Mixed:
    """Muon for matrices of layers, AdamW for the rest."""
    matrices = [(n, p) for n, p in named if n.startswith("layers.") and p.ndim == 2 and p.numel()]
    rest = [(n, p) for n, p in named if n not in dict(matrices)]
    groups = [(matrices, "muon", 0.02), (rest, "adamw", 0.01)]
    return block_optim.Mixed(
        [{"params": some, "algorithm": algorithm, "lr": lr} for some, algorithm, lr in groups if some]
    )


def dtype_of(program: Program) -> torch.dtype:
    """The dtype of a program's parameters: double, where everything has it, so that rounding hides nothing."""
    return (
        SINGLE if program.quantized or program.precision == "autocast" else OPTIMIZERS[program.optimizer][1]
    )


def tolerance_of(program: Program) -> float:
    """The relative error that a program allows against one process, of the largest element of a tensor."""
    narrow = dtype_of(program) == SINGLE or "two dtypes" in program.layers or ("to_dtype",) in program.actions
    pieces = 5 if program.mesh == "tp" else 1  # each has codes of its own
    codes, states = QUANTIZED[program.quantized][1], OPTIMIZERS[program.optimizer][2]
    return max(PRECISIONS[program.precision][1], pieces * codes, pieces * states, 1e-4 if narrow else 0.0)


class Coded:
    """Lets a module compute with weights read back from their codes, as units with this policy do."""

    def __init__(self, policy: QuantizationPolicy):
        self.format, self.select = policy.weights, policy.select or matrices_only
        self.masters: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    def follow(self, module: nn.Module) -> None:
        """Do so in each forward."""
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        for name, inner in module.named_modules():
            for attribute, param in inner._parameters.items():
                if isinstance(param, nn.Parameter) and self.select(f"{name}.{attribute}", param, inner):
                    self.masters.append((inner._parameters, attribute, param))
        for slots, attribute, param in self.masters:
            slots[attribute] = _Codes.apply(param, self.format)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for slots, attribute, param in self.masters:
            slots[attribute] = param
        self.masters.clear()


class _Codes(torch.autograd.Function):
    """A weight read back from its codes; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, form: Any) -> torch.Tensor:
        grid = form.grid(tuple(param.shape))
        codes = torch.zeros(grid.rows * form.code_bytes(grid.columns), dtype=torch.uint8)
        scales, out = torch.zeros(grid.num_scales), torch.zeros(param.numel())
        run = RowRun(grid, 0, grid.rows)
        form.quantize([run], param.reshape(-1).contiguous(), codes, scales)
        form.dequantize([run], codes, scales, out)
        return out.view(param.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad, None


class System:
    """One process with plain modules: each rank its own, whose gradients are averaged over the ranks."""

    name = "alone"
    api: Any = None

    def wrap(self, model: Model, program: Program) -> list[Any]:
        """Shard the model; returns its units, innermost calls first as the program says."""
        for param in model.parameters():
            param.data = param.data.contiguous()  # as shards are
        policy = QUANTIZED[program.quantized][0]
        if policy is not None and policy.at_rest is not None:
            for name, param in model.named_parameters():
                if policy.select is not None and policy.select(name, param, model):
                    param.data = _Codes.apply(param.data, policy.at_rest)
        elif policy is not None and policy.weights is not None:
            for module in (model, *model.layers):
                Coded(policy).follow(module)
        self._compile(model, program)
        return []

    def _compile(self, model: Model, program: Program) -> None:
        # As torch's error says where a backward keeps its graph.
        torch._functorch.config.donated_buffer = False
        compiled: dict[str, list[nn.Module]] = {"": [], "layers": [*model.layers], "model": [model]}
        for module in compiled[program.compiled]:
            module.compile(backend="aot_eager")

    def check_memory(self, model: Model, program: Program, units: list[Any]) -> None:
        """Raise if units at rest hold gathered buffers, or parameters other memory than the formula says."""

    def laid_out(self, param: nn.Parameter, value: torch.Tensor, how: str) -> torch.Tensor:
        """A gradient of this value for a parameter, laid out as a user may."""
        return value

    def average(self, params: dict[str, nn.Parameter]) -> None:
        """Average gradients over all ranks; None is zero where another rank has one."""
        trained = list(params.values())
        there = torch.tensor([param.grad is not None for param in trained], dtype=DOUBLE)
        zeros = [torch.zeros(param.numel(), dtype=DOUBLE) for param in trained]
        parts = [
            zero if param.grad is None else param.grad.detach().to_dense().reshape(-1).to(DOUBLE)
            for param, zero in zip(trained, zeros, strict=True)
        ]
        flat = torch.cat([there, *parts])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        used, *averaged = flat.split([len(trained), *(param.numel() for param in trained)])
        for param, any_rank, grad in zip(trained, used.tolist(), averaged, strict=True):
            if any_rank and (param.grad is None or param.grad.is_sparse):
                param.grad = torch.empty_like(param, memory_format=torch.contiguous_format)
            if any_rank:
                assert param.grad is not None
                with torch.no_grad():
                    param.grad.copy_(grad.view(param.shape))


class Sharded(System):
    """This runtime, or FSDP2."""

    def __init__(self, name: str, pinned: bool = False):
        self.name = name
        self.api = {"ours": fsdp_runtime, "fsdp2": fsdp}[name]
        self.offload = self.api.CPUOffloadPolicy(pin_memory=pinned)
        self.ours = name == "ours"
        self._lent: int | None = None  # bytes of gathered buffers that others in this process use

    def wrap(self, model: Model, program: Program) -> list[Any]:
        for name, param in model.named_parameters():
            if program.is_plain(name):
                param.data = param.data.contiguous()  # for optimizers of blocks
        if program.mesh == "tp":
            for index, kind in enumerate(program.layers):
                if kind == "split":
                    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(model.layers[index], self._tensor_mesh(program)["tp"], plan)
        for module in model.modules():
            if isinstance(module, Bank) and program.mesh == "ep":
                module.divide(_expert_mesh()["ep"])
            if isinstance(module, Subclass):
                module.linear.weight = nn.Parameter(
                    Wrapped(module.linear.weight.detach()), module.linear.weight.requires_grad
                )
        units = [self.shard(model, program, unit) for unit in program.units]
        for module in model.modules():
            if isinstance(module, TwoForwards) and isinstance(module, self.api.FSDPModule):
                self.api.register_fsdp_forward_method(module, "encode")
        self._compile(model, program)
        if self.ours and self._lent is None:
            self._lent = self._in_use(units[0])
        return units

    def shard(self, model: Model, program: Program, unit: Unit) -> Any:
        """Call `fully_shard`; returns the last of the unit's modules."""
        mesh, choose = self._mesh(program)
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": PRECISIONS[program.precision][0],
        }
        if choose is not None:
            options["shard_placement_fn"] = choose
        if program.offload:
            options["offload_policy"] = self.offload
        if program.transport:
            options["transport"] = program.transport
        if program.quantized:
            options["quantization_policy"] = QUANTIZED[program.quantized][0]
        modules: list[Any] = [model.get_submodule(path) for path in unit.modules]
        if program.mesh == "ep" and all(isinstance(module, Bank) for module in modules):
            options |= {"mesh": _expert_mesh()["efsdp"], "shard_placement_fn": None}
        own: dict[str, Any] = {"reshard_after_forward": unit.reshard}
        named = [*model.named_parameters(remove_duplicate=False)]
        if ignored := {
            p for n, p in named if p.dtype == torch.bool or any(part in n for part in program.ignored)
        }:
            own["ignored_params"] = ignored  # as the refusal of bool says
        if unit.offload:
            own["offload_policy"] = self.offload
        # A layer after it may be in a unit that casts no inputs.
        if "" not in unit.modules and not all(isinstance(module, Packed) for module in modules):
            own["mp_policy"] = dataclasses.replace(options["mp_policy"], output_dtype=None)
        if self.ours:
            own |= {"block_policy": POLICIES[unit.blocks], "skippable": unit.skippable}
        # A head's name says nothing in a unit without its parent: the documentation leaves policies out there.
        head = "head" in unit.modules and {*unit.modules} <= {"head", "norm"}
        if program.quantized and (head or not _takes(program.quantized, modules)):
            own["quantization_policy"] = None
        self.api.fully_shard(modules if len(modules) > 1 else modules[0], **{**options, **own})
        if (
            program.mesh == "ep"
        ):  # experts get gradients from all ranks, over whatever mesh their unit reduces them
            modules[-1].set_gradient_divide_factor(dist.get_world_size())
            modules[-1].set_force_sum_reduction_for_comms(True)  # with gloo FSDP2 divides no other way
        return modules[-1]

    @staticmethod
    def _in_use(unit: Any) -> int:
        """Bytes of gathered buffers in use, without models of programs before, which may be in cycles."""
        if gathered_memory(unit).lent_bytes:
            gc.collect()
        return gathered_memory(unit).lent_bytes

    def check_memory(self, model: Model, program: Program, units: list[Any]) -> None:
        # A failed backward that nobody clears away keeps its memory until the next forward.
        keeps = not units or any(one[0] == "option" or one in FAILED for one in program.actions)
        if self.ours and not keeps:
            lent = self._in_use(units[0]) - (self._lent or 0)
            assert lent <= 0, f"at rest {lent} bytes of gathered buffers are in use"
        if any(one[0] in ("remove_layer", "replace_layer") for one in program.actions):
            return  # the unit around a layer that is gone still has its parameters
        own = {("state_dict", "assign"), ("state_dict", "and back"), ("files", True)}
        assigned = any(one in own or one[0] == "assign_data" for one in program.actions)
        named = [(name, param) for name, param in model.named_parameters() if not program.is_plain(name)]
        params = [param for _, param in named if param.dtype != torch.bool]  # which units leave out
        locals_ = [getattr(param, "_local_tensor", param) for param in params]
        if self.ours and not assigned and all(type(one.data) is torch.Tensor for one in locals_):
            held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in locals_}
            said = sum(unit_memory(unit).weights for unit in units)
            assert sum(held.values()) == said, f"parameters hold {held} bytes, unit_memory says {said}"

    def _mesh(self, program: Program) -> tuple[Any, Any]:
        ranks = dist.get_world_size()
        if program.mesh == "part":  # see World.elsewhere
            size = ranks // 2 if ranks % 2 == 0 else 1
            return rank_mesh(ranks // size, size, names=("parts", "part"))["part"], None
        if program.departs:  # where nothing notices, the group's timeout must
            return DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=TIMEOUT)), "cpu"), None
        if program.mesh == "hsdp":
            return rank_mesh(2, ranks // 2, names=("replicate", "shard")), None
        if program.mesh == "tp":
            mesh = self._tensor_mesh(program)
            return mesh["copy", "dp"] if program.replicas else mesh["dp"], None
        if program.mesh == "pp":  # see pipeline_actions.staged
            return rank_mesh(2, ranks // 2, names=("pp", "pdp"))["pdp"], None
        if program.mesh == "ep":
            return rank_mesh(ranks), lambda param: self._placed(_expert_mesh()["efsdp"], is_divided(param))
        if program.mesh == "two":
            flat, hybrid = (
                rank_mesh(ranks, names=("fsdp",)),
                rank_mesh(2, ranks // 2, names=("copies", "cut")),
            )
            return flat, lambda param: hybrid if param.ndim == 1 else None
        return rank_mesh(ranks), None

    def _tensor_mesh(self, program: Program) -> DeviceMesh:
        ranks = dist.get_world_size()
        shape, names = (
            ((2, 1, 2), ("copy", "dp", "tp")) if program.replicas else ((ranks // 2, 2), ("dp", "tp"))
        )
        return rank_mesh(*shape, names=names)

    def _placed(self, mesh: DeviceMesh, cut: bool) -> Any:
        """What says that a parameter is sharded over another mesh: ours takes the mesh itself."""
        if not cut or self.ours:
            return mesh if cut else None
        return _fsdp_common.ShardPlacementResult(Shard(0), _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0))

    def laid_out(self, param: Any, value: torch.Tensor, how: str) -> torch.Tensor:
        if how == "zeros_like":
            return torch.zeros_like(param).add_(value.flatten()[0].item() if value.numel() else 0.0)
        if how == "whole" or not hasattr(param, "device_mesh"):  # or the unit leaves the parameter alone
            return value
        last = Shard(0) if how == "Shard(0)" and param.ndim else Replicate()
        placements = [*[Replicate()] * (param.device_mesh.ndim - 1), last]
        return distribute_tensor(value, param.device_mesh, placements, src_data_rank=None)

    def average(self, params: dict[str, nn.Parameter]) -> None:
        """Average those outside units, as DDP would."""
        if plain := {name: param for name, param in params.items() if _is_plain(param)}:
            super().average(plain)


def _is_plain(param: nn.Parameter) -> bool:
    """Whether no unit and no other parallelism has a parameter."""
    return not hasattr(param, "device_mesh")


def _expert_mesh() -> DeviceMesh:
    return rank_mesh(dist.get_world_size() // 2, 2, names=("efsdp", "ep"))


def _takes(quantized: str, modules: list[nn.Module]) -> bool:
    """Whether any of the modules has a weight that the policy selects; a policy that selects nothing raises."""
    names = [n for module in modules for n, p in module.named_parameters() if p.ndim >= 2]
    return quantized == "bf16" or any(quantized != "nf4" or "frozen.w" in name for name in names)


def system(name: str) -> System:
    """The system of a name: "alone", "ours", "fsdp2", or "simulated": ours, of whose copies the host waits for none."""
    if name == "simulated":
        return Sharded("ours", pinned=True)
    return System() if name == "alone" else Sharded(name)

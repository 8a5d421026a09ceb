"""`FSDPModule`: the methods of a module after `fully_shard`, FSDP2's with FSDP2's meaning."""

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _torch_compat as compat
from ._grads.scaling import AllReduceHook
from ._params.empty_buffers import note_empty
from ._params.unit import Unit
from ._schedule import hooks
from ._schedule.model import Member, member_of
from ._schedule.passes import Pass
from ._schedule.torch_state import StateForTorch

_SHARDED, _UNSHARDED = operator.attrgetter("sharded"), operator.attrgetter("unsharded")
_initialise_new = True


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Let `FSDPModule.__new__` make plain modules without calling their `__init__`."""
    global _initialise_new
    before, _initialise_new = _initialise_new, False
    try:
        yield
    finally:
        _initialise_new = before


class UnshardHandle(fsdp.UnshardHandle):
    """An unshard under way; from `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the full parameters (on CUDA: make the current stream wait) and put them into the module."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.unshard()
            unit.by_hand = True
            unit.show()


class GradientReductionHandle(compat.GradientReductionHandle):
    """Reductions under way; from `FSDPModule.finalize_backward(async_op=True)`."""

    def __init__(self, passes: Pass) -> None:
        self._passes: Pass | None = passes
        self._resets = passes.resets

    def wait(self) -> None:
        """Wait for the reductions (on CUDA: make the current stream wait).

        Raises:
            RuntimeError: `reset_iter_state` has cleared them away.
        """
        if self._passes is None:
            return
        if self._passes.resets != self._resets:
            raise RuntimeError(
                "GradientReductionHandle.wait: reset_iter_state() has dropped these reductions; call backward and "
                "finalize_backward again"
            )
        self._passes.publish()
        self._passes = None


class FSDPModule(fsdp.FSDPModule):
    """Mixed into the class of each module that `fully_shard` was called on. A subclass of torch's.

    Every public method of torch's class is this package's own, calls one, or raises NotImplementedError with its name.

    Methods with `recurse` act on this module's unit and, if true, on all units inside. None communicates unless it
    says so.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Indexing a container makes a new one of the same class: that is a plain container of the original class.
        original = cls.__mro__[cls.__mro__.index(fsdp.FSDPModule) + 1]
        module = original.__new__(original, *args, **kwargs)
        if _initialise_new:
            module.__init__(*args, **kwargs)
        return module

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError(
            "FSDP does not support deepcopy: parameters are views of buffers that process groups work on. Copy the "
            "module before fully_shard, or go through state_dict()"
        )

    # -- sharded <-> unsharded --------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters (one all-gather: (N-1)/N of them, in the compute dtype, come to each rank).

        Args:
            async_op: return at once, with a handle; the unit's forward waits automatically.
        """
        member = _member(self)
        unit = member.unit
        member.passes.forget_failed_backward()
        member.passes.forget_graph()
        if unit.has_moved():
            unit.adopt()
        if unit.installed and unit.changed_since_gather:
            unit.reshard()
        unit.gather()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters and put the sharded ones into the module.

        With `CPUOffloadPolicy` the host waits until they have been copied to the device, so that they may be changed.
        """
        member = _member(self)
        member.unit.reshard()
        if member.unit.offloaded:
            member.passes.finish_copies()

    def reset_iter_state(self) -> None:
        """Clear away a forward or backward that raised; its gradients, accumulated ones included, are lost.

        The next forward of the root does so automatically.

        Raises:
            RuntimeError: this is not the root.
        """
        _root(self, "reset_iter_state").passes.reset()

    # -- gradients --------------------------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends the step: then it waits for all reductions."""
        _member(self).passes.backward.is_last = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether `finalize_backward` ends a step, regardless of `set_is_last_backward`.

        Torch's pipelining calls it from torch 2.15 on.

        Raises:
            RuntimeError: this is not the root, or a backward is under way.
        """
        passes = _root(self, "set_manual_backward_finalization").passes
        passes.forget_failed_backward()
        if passes.in_backward and enabled != passes.backward.by_hand:
            raise RuntimeError("set_manual_backward_finalization cannot change during a backward")
        passes.backward.by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End a step after all its backwards: reduce the remaining gradients, reshard, and set `.grad`.

        Gradients that a schedule wrote past autograd's hooks are taken too. Communicates one reduction for each unit
        whose gradients wait, as the end of backward does.

        Args:
            async_op: return a handle when the reductions are under way; its `wait` comes before the gradients are read.

        Raises:
            RuntimeError: this is not the root, `set_manual_backward_finalization(True)` was not called, or a backward
                is under way.
        """
        passes = _root(self, "finalize_backward").passes
        if not passes.backward.by_hand:
            raise RuntimeError(
                "finalize_backward: call set_manual_backward_finalization(True) before forward"
            )
        if passes.in_backward:
            raise RuntimeError("finalize_backward: call it after the backward, not inside it")
        for unit in reversed(passes.units):
            passes.leave_backward_by_hand(unit)
        passes.finish_backward()
        passes.rest(free=False)
        handle = GradientReductionHandle(passes)
        if async_op:
            return handle
        handle.wait()
        return None

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        copies: bool = False,
        pp_mesh: DeviceMesh | None = None,
    ) -> torch.Tensor:
        """`fsdp_runtime.clip_grad_norm_` of all parameters in this module, also if they are gathered just now."""
        from .optim.clip import clip_grad_norm_

        module: Any = self
        params = [param for unit in _units(module, True) for param in unit.params]
        sharded = list(map(_SHARDED, params))
        managed = {*map(id, sharded), *map(id, map(_UNSHARDED, params))}
        others = [param for param in module.parameters() if id(param) not in managed]
        return clip_grad_norm_(
            sharded + others, max_norm, norm_type, error_if_nonfinite, copies=copies, pp_mesh=pp_mesh
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, also of parameters that are gathered just now."""
        super(fsdp.FSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]
        for unit in _units(self, True):
            for param in unit.params:
                grad = param.sharded.grad
                param.sharded.grad = None if grad is None or set_to_none else grad.detach().zero_()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; else they add up, unsharded, in the reduce dtype."""
        for unit in _units(self, recurse):
            reduction = replace(unit.options.reduction, all_reduce=requires_gradient_sync)
            unit.configure(requires_gradient_sync=requires_gradient_sync, reduction=reduction)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward also reduces across replicas (HSDP); else each keeps a partial sum, to be added to."""
        for unit in _units(self, recurse):
            _change_reduction(unit, all_reduce=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by this instead of the number of ranks. Raises ValueError for 0 or less."""
        if not factor > 0:
            raise ValueError(f"gradient divide factor {factor}: expected a positive number")
        _change_reduction(_unit(self), divide_factor=float(factor))

    # FSDP2's deprecated name of it.
    set_reduce_scatter_divide_factor = fsdp.FSDPModule.set_reduce_scatter_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Send sums only, dividing afterwards: some of NCCL's fast paths know nothing else."""
        _change_reduction(_unit(self), force_sum=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters that got no gradient on this rank get one of zeros, plus other ranks' gradients.

        Off by default: parameters that no rank used have no gradient on any rank, the others have one on every rank.

        Needed where ranks use different units in a step: without it a unit of which this rank used nothing is not
        reduced. Forward still has to run on every rank, since it gathers: leave its result out of the loss.
        """
        for unit in _units(self, recurse):
            unit.configure(reduce_unused=reduce_scatter_unused_params)

    def set_reduction_step(self, step: int, *, recurse: bool = True) -> None:
        """Let stochastic rounding of gradients (`BlockInt8(..., rounding="stochastic")`) depend on the step's number.

        Call it before each step, with the same number on every rank: a resumed run then rounds as an uninterrupted
        one. Without it reductions are counted, from 0 in each process.

        Raises:
            TypeError, ValueError: no integer of 0 or more.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"set_reduction_step: step must be an int, got {type(step).__name__}")
        if step < 0:
            raise ValueError(f"set_reduction_step: step {step}: expected 0 or more")
        for unit in _units(self, recurse):
            for group in unit.groups:
                group.gradients.set_step(step)

    def set_all_reduce_hook(self, hook: AllReduceHook, *, stream: Any = None) -> None:
        """Call `hook(flat)` with each flat shard of reduced gradients (1-D, the reduction's dtype).

        They are the mean over ranks; or, where the division comes after the hook, the sum: with a divide factor, with
        `set_force_sum_reduction_for_comms(True)`, and in fp16, where a part of it comes before. Called in backward,
        after the reduce-scatter, or with HSDP after the all-reduce; once for each segment and dtype of the unit. All
        trained parameters of reduced groups get a gradient: ranks outside the mesh may have used them.

        Raises:
            ValueError: a stream with HSDP, where the hook runs on the reduction's.
        """
        unit = _unit(self)
        if stream is not None and any(data.hybrid for data in unit.meshes):
            raise ValueError("set_all_reduce_hook: stream cannot be set with HSDP, whose own stream is used")
        _change_reduction(unit, hook=hook, hook_stream=stream)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many gathered gradient buffers may be on their way at once. 1 by default: least memory.

        It is one number for all units of a model, so `recurse` changes nothing.

        Raises:
            TypeError, ValueError: no positive integer.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        _member(self).passes.backward.max_reductions = max_input_buffers

    # -- when to gather and free ------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed after forward and gathered again in backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in _units(self, recurse):
            unit.configure(reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after backward; else the next forward need not gather them.

        False, set between forward and backward, gathers them at once (one all-gather a unit): a schedule that computes
        weight gradients by themselves looks for the unsharded parameters in the module before backward runs.
        """
        units = _units(self, recurse)
        for unit in units:
            unit.configure(reshard_after_backward=reshard_after_backward)
        if not reshard_after_backward:
            _member(self).passes.gather_for_backward(units)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether memory of unsharded parameters stays allocated, at one address, while they are sharded.

        For CUDA graphs and engines that read parameters by address: each gather writes to the memory of the one before,
        also after a step, a loaded state dict or `reload`. Parameters that are moved or change their dtype get new
        memory. Takes the unsharded parameters' bytes at all times. Torch has it from 2.15 on.

        Raises:
            NotImplementedError: unsharded parameters that a tensor subclass makes.
        """
        for unit in _units(self, recurse):
            unit.configure(keep_storage=bool(keep))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this unit's parameters; an embedding's, for one, it does not."""
        _unit(self).configure(unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[fsdp.FSDPModule]) -> None:
        """Set the units to gather ahead when this one runs in forward, instead of the next ones of the last forward."""
        _unit(self).configure(forward_prefetch=_listed(modules))

    def set_modules_to_backward_prefetch(self, modules: list[fsdp.FSDPModule]) -> None:
        """Set the units to gather ahead when this one runs in backward, instead of the expected ones."""
        _unit(self).configure(backward_prefetch=_listed(modules))

    def set_prefetch_depth(self, depth: int) -> None:
        """How many units to gather ahead, for the whole model; 1 by default. Each takes one more gathered buffer.

        Raises:
            ValueError: negative.
        """
        if depth < 0:
            raise ValueError(f"prefetch depth {depth}: expected 0 or more units")
        _member(self).passes.prefetch_depth = depth

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's gathers wait for this event, once, instead of all that the current stream holds."""
        _member(self).passes.gather_after(event)

    # -- how bytes travel -------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit's parameters with FSDP2's `AllGather` protocol: `comm.allocate`, then `comm(...)`.

        It works on memory that it allocates itself, so each gather copies this rank's shard into that memory and the
        gathered parameters out of it, holds them twice meanwhile, and blocks (`async_op=False`, as FSDP2). One call
        a gather; bytes where the unit has several dtypes. One rank alone makes no call.

        Raises:
            TypeError: `comm` does not have the protocol.
        """
        from ._custom_comm import CustomAllGather

        _unit(self).configure(gather_by=CustomAllGather.by(comm, "set_custom_all_gather"))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this unit's gradients with FSDP2's `ReduceScatter` protocol: `comm.allocate` twice, then `comm(...)`.

        Each reduction copies the gathered gradients into the first allocation and the reduced shard out of the
        second, and blocks (`async_op=False`, as FSDP2). One call for each dtype. One rank alone makes no call.

        Raises:
            TypeError: `comm` does not have the protocol.
        """
        from ._custom_comm import CustomReduceScatter

        _unit(self).configure(reduce_by=CustomReduceScatter.by(comm, "set_custom_reduce_scatter"))

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reductions have a separate process group, so that a GPU runs gathers at the same time.

        Makes one process group for each set of ranks that parameters are cut over: all of them must call.
        """
        for unit in _units(self, recurse):
            if enable:
                for data in unit.meshes:
                    data.reduction_group()
            unit.configure(separate_reductions=enable)

    # -- FSDP2's settings without a meaning here --------------------------------------------------------------------

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused unless False: buffers come from torch's allocator, and gloo has none to try this with."""
        if enable:
            _refuse(
                "set_allocate_memory_from_process_group_for_comm",
                "buffers are recycled from torch's allocator; to stage them in other memory, use "
                "set_custom_all_gather and set_custom_reduce_scatter",
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused: buffers come from torch's allocator, and nothing but NCCL on several GPUs could show it right."""
        _refuse(
            "set_symm_mem_for_comm",
            "buffers are recycled from torch's allocator, and symmetric memory was not tried on GPUs; to stage "
            "gathers in it, use set_custom_all_gather",
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: gathers are asynchronous always, and allocate on known streams."""

    def _get_fsdp_state(self) -> Any:
        """The state that torch's own functions read; see `_schedule.torch_state`."""
        return StateForTorch(_member(self))

    # -- moving -----------------------------------------------------------------------------------------------------

    def to_empty(self, *args: Any, **kwargs: Any) -> Any:
        """torch's. What is in buffers afterwards must be loaded or written before a forward, which raises otherwise."""
        result = super(fsdp.FSDPModule, self).to_empty(*args, **kwargs)  # type: ignore[misc]
        note_empty(self.modules() if kwargs.get("recurse", True) else (self,))  # type: ignore[attr-defined, arg-type]
        return result

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`to`, `to_empty`, `half` and so on act on the sharded parameters, which then move into the buffers."""
        unit = _unit(self)
        unit.reshard()
        result = super(fsdp.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        if unit.has_one_dtype:  # else another module of its list follows, or the next forward raises
            unit.adopt()
        return result


def _refuse_by_name(name: str) -> Callable[..., NoReturn]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(name, f"torch {torch.__version__} has it, this version of fsdp_runtime does not")

    return method


for _name in vars(fsdp.FSDPModule).keys() - vars(FSDPModule).keys():
    if not _name.startswith("_"):  # a torch newer than the tried ones
        setattr(FSDPModule, _name, _refuse_by_name(_name))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of the module gather and free parameters as `forward` does. No effect on other modules.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return hooks.call_method(self, _member(self), original, args, kwargs)

    setattr(module, method_name, method.__get__(module, type(module)))  # type: ignore[attr-defined]


def share_comm_ctx(modules: "list[FSDPModule]") -> None:
    """Let several roots (pipeline stages in one process) use the same streams; here all units of a device do anyway.

    Raises:
        ValueError: one is not an `FSDPModule`.
    """
    _listed(modules)


def _member(module: Any) -> Member:
    member = member_of(module)
    assert member is not None
    return member


def _unit(module: Any) -> Unit:
    return _member(module).unit


def _units(module: Any, recurse: bool) -> list[Unit]:
    members = dict.fromkeys(member_of(sub) for sub in (module.modules() if recurse else [module]))
    return [member.unit for member in members if member is not None]


def _change_reduction(unit: Unit, **changes: Any) -> None:
    unit.configure(reduction=replace(unit.options.reduction, **changes))


def _root(module: FSDPModule, method: str) -> Member:
    member = _member(module)
    if not member.unit.root:
        raise RuntimeError(
            f"{member.unit.name}: {method} must be called on the root module, the outermost that "
            "fully_shard was called on"
        )
    return member


def _listed(modules: Iterable[Any]) -> tuple[Unit, ...]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return tuple(_unit(module) for module in modules)


def _refuse(method: str, why: str) -> NoReturn:
    raise NotImplementedError(f"{method} does not apply: {why}. Remove the call")


_MIXED: dict[type, type] = {}


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """The class that `fully_shard` gives to modules of each class."""
    return _MIXED


def mixed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that modules of a class get. Python raises TypeError for classes that cannot be mixed with another."""
    if cls not in _MIXED:
        pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
        own = {"save_pretrained": _save_pretrained} if issubclass(cls, pretrained) else {}
        _MIXED[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), own)
    return _MIXED[cls]


def _save_pretrained(
    self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
) -> Any:
    """As transformers' own, with a state dict; without one, of a model that transformers has not sharded, it raises.

    Raises:
        NotImplementedError: there is no state dict, and this rank has shards only.
    """
    if state_dict is None and getattr(self.config, "distributed_config", None) is None:
        raise NotImplementedError(
            f"{type(self).__name__}.save_pretrained: this rank holds shards; call it on every rank with "
            "state_dict=fsdp_runtime.get_full_state_dict(model) and is_main_process=(rank == 0), or call "
            "fsdp_runtime.save_safetensors(model, folder)"
        )
    parent: Any = super(FSDPModule, self)
    return parent.save_pretrained(save_directory, is_main_process, state_dict, **options)

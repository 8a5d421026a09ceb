"""Rules for elementwise ops: they run on local tensors, once the operands' shardings agree."""

from typing import Any

import torch

from ragged_shard._autograd import local_and_sharding
from ragged_shard._ops import operands
from ragged_shard._ops.fallback import fallback, require_reduced
from ragged_shard._ops.reduce import filled
from ragged_shard._sharding import Sharding
from ragged_shard._tensor import Handler, RaggedDTensor
from ragged_shard._torch_compat import Op

_wrap = RaggedDTensor._wrap
_AS_THE_OTHER = (
    "make it like the ragged one, by ragged_shard.redistribute(it, placements=ragged.placements), or the ragged one "
    "like it, by ragged.redistribute(placements=it.placements). States of an optimizer that torch's "
    "distribute_tensor or set_optimizer_state_dict made are loaded by "
    "ragged_shard.state_dict.load_full_optimizer_state_dict, or with "
    "broadcast_from_rank0=True unless the parameter is a scalar"
)


# Of integers, these refuse a divisor of 0.
_DIVISIONS = {"floor_divide", "div", "remainder", "fmod"}


def pointwise(op: Op) -> Handler:
    """``out[i] = op(a[i], b[i], ...)``; an op whose name ends with an underscore writes its first operand."""
    written = next((a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write), None)
    divides = _name(op) in _DIVISIONS

    def handle(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sharding: Sharding | None = None
        local_args: list[Any] = []
        for arg in args:
            if type(arg) is RaggedDTensor:
                if sharding is None:
                    sharding = arg._sharding
                elif arg._sharding is not sharding:
                    return _mixed(func, args, kwargs, written)
                local_args.append(arg._local_tensor)
            elif isinstance(arg, torch.Tensor):
                return _mixed(func, args, kwargs, written)
            else:
                local_args.append(arg)
        if sharding is None or not sharding.ordinary or kwargs:
            return _mixed(func, args, kwargs, written)
        if divides:
            _divide_something(func, local_args, kwargs)
        result = func(*local_args)
        return args[0] if written else _wrap(result, sharding)

    return handle


def _mixed(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], written: str | None) -> Any:
    """The same for operands that do not all have one ordinary sharding."""
    values = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    target = operands.ragged_sharding(values)
    if target is None:
        # Such as a plain gradient times a norm's coefficient.
        if written and not isinstance(args[0], RaggedDTensor):
            args = (args[0], *map(operands.number_of, args[1:]))
            if not any(isinstance(v, RaggedDTensor) for v in (*args, *kwargs.values())):
                return func(*args, **kwargs)
        return fallback(func, args, kwargs)
    result = kwargs.get(written, args[0]) if written else None
    if written:
        target = operands.ragged_sharding([result]) or target
        if not (isinstance(result, RaggedDTensor) and result._sharding == target):
            raise ValueError(
                f"{func} writes an operand that is not distributed like the ragged one ({target}); {_AS_THE_OTHER}"
            )
        if written in kwargs:
            inputs = (*args, *[value for key, value in kwargs.items() if key != written])
            shape = torch.broadcast_shapes(*[v.shape for v in inputs if isinstance(v, torch.Tensor)])
            if shape != target.shape:
                raise ValueError(
                    f"{func}: a result of shape {tuple(shape)} for {written}= of shape {tuple(target.shape)}, which "
                    "cannot be resized; pass a tensor of the result's shape"
                )
    if target.partial:
        numbers = [a for a in args if isinstance(a, (torch.Tensor, int, float))]
        operands.check_linear(func, target, numbers[:2], kwargs)
    passed = [*args, *kwargs.values()]
    targets, recorded = [target] * len(passed), operands.recorded(values)
    locals_ = operands.to_locals(passed, targets, func, writes=bool(written), recorded=recorded)
    local_args, local_kwargs = locals_[: len(args)], dict(zip(kwargs, locals_[len(args) :], strict=True))
    if _name(func) in _DIVISIONS:
        _divide_something(func, local_args, local_kwargs)
    local_result = func(*local_args, **local_kwargs)
    if written:
        return result
    assert local_result.shape == target.local_shape, (func, local_result.shape, target)
    return _wrap(local_result, target)


def _name(op: Op) -> str:
    """The op's name without a namespace and the mark of its in-place form."""
    return op._schema.name.removeprefix("aten::").rstrip("_")


def _divide_something(func: Op, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Raise on a rank without elements as on the others, where integers are divided by a 0 that all ranks have."""
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    if all([t.numel() for t in tensors]) or any([t.is_floating_point() for t in tensors]):  # noqa: C419
        return

    def with_elements(value: Any) -> Any:
        return value if not isinstance(value, torch.Tensor) or value.numel() else filled(value)

    func(*map(with_elements, args), **{key: with_elements(value) for key, value in kwargs.items()})


def foreach(op: Op) -> Handler:
    """The pointwise rule for each position of lists of tensors. Used for fused optimizer steps too."""
    in_place = op._schema.name.endswith("_")

    def handle(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            shardings = [t._sharding for t in args[0]]
        except AttributeError:
            return _foreach_mixed(func, args, kwargs)
        local_args: list[Any] = []
        for arg in args:
            if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor):
                if type(arg[0]) is not torch.Tensor:
                    # Only ragged tensors have a _sharding; comparing lists tests identity first, in C.
                    try:
                        if arg is not args[0] and [t._sharding for t in arg] != shardings:
                            return _foreach_mixed(func, args, kwargs)
                    except AttributeError:
                        return _foreach_mixed(func, args, kwargs)
                    arg = [t._local_tensor for t in arg]
                elif any([type(t) is not torch.Tensor or t.ndim for t in arg]):  # noqa: C419
                    return _foreach_mixed(func, args, kwargs)
            elif isinstance(arg, torch.Tensor) and (type(arg) is not torch.Tensor or arg.ndim):
                arg = _scalar(arg, func)
            local_args.append(arg)
        if not all([sharding.ordinary for sharding in shardings]):  # noqa: C419  # a list is faster
            return _foreach_mixed(func, args, kwargs)
        result = func(*local_args, **{k: _scalar(v, func) for k, v in kwargs.items()})
        if in_place:
            return None
        return [_wrap(t, sharding) for t, sharding in zip(result, shardings, strict=True)]

    return handle


def _scalar(value: Any, func: Op) -> Any:
    """One number for all positions: a plain or Replicate tensor of one element, or not a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if not operands.is_distributed(value) and value.numel() == 1:
        return value
    if operands.is_distributed(value):
        local, sharding = local_and_sharding(value)
        if sharding.replicate and local.numel() == 1:
            return local
    raise ValueError(f"{func}: expected one number for all positions, plain or Replicate, got {value}")


def _foreach_mixed(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ragged positions go to their local tensors, all others back to torch; then the results are merged."""
    is_list = [isinstance(a, (list, tuple)) for a in args]
    count = len(args[0])
    targets = [
        operands.ragged_sharding(
            [a[i] for a, lst in zip(args, is_list, strict=True) if lst and len(a) == count]
        )
        for i in range(count)
    ]
    ragged = [i for i, target in enumerate(targets) if target is not None]
    if not ragged and any(isinstance(t, RaggedDTensor) for lst in args if isinstance(lst, list) for t in lst):
        return fallback(func, args, kwargs)
    for i in ragged:
        _check_position(func, args, kwargs, i, targets[i])
    others = [i for i in range(count) if targets[i] is None]
    in_place = func._schema.name.endswith("_")

    lists = [arg for arg, lst in zip(args, is_list, strict=True) if lst and len(arg) == count]
    recorded = operands.recorded([values[i] for values in lists for i in ragged])

    def local(arg: Any) -> Any:
        if not isinstance(arg, (list, tuple)):
            return _scalar(arg, func)
        if len(arg) != count:
            return arg
        shardings: list[Any] = [targets[i] for i in ragged]
        return operands.to_locals(
            [arg[i] for i in ragged], shardings, func, writes=in_place, recorded=recorded
        )

    results: list[Any] = [None] * count
    # The others first: if torch refuses them, nothing ragged has been written yet. DTensors separate from plain ones.
    kinds = [[i for i in others if operands.is_distributed(args[0][i]) is kind] for kind in (True, False)]
    for group in filter(None, kinds):
        rest = [
            [a[i] for i in group] if lst and len(a) == count else operands.number_of(a)
            for a, lst in zip(args, is_list, strict=True)
        ]
        for i, result in zip(group, func(*rest, **kwargs) or (), strict=False):
            results[i] = result
    if not ragged:
        return None if func._schema.name.endswith("_") else results
    local_results = func(*map(local, args), **{k: _scalar(v, func) for k, v in kwargs.items()})
    if local_results is None or in_place:
        return None
    for i, result in zip(ragged, local_results, strict=True):
        results[i] = _wrap(result, targets[i])  # type: ignore[arg-type]
    return results


def _check_position(
    func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], i: int, target: Sharding | None
) -> None:
    """Raise for a tensor that is written and not distributed as the first one, or ops on pending sums."""
    assert target is not None
    for info, arg in zip(func._schema.arguments, args, strict=False):
        if info.alias_info is None or not info.alias_info.is_write or len(arg) != len(args[0]):
            continue
        if (arg is args[0] or arg[i].ndim) and getattr(arg[i], "_sharding", None) != target:
            raise ValueError(
                f"{func} writes tensor {i} of {info.name}, which is not distributed as {target}; {_AS_THE_OTHER}"
            )
    if target.partial:
        values = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        operands.check_linear(func, target, values[:2], kwargs)
        if len(values) > 2:
            require_reduced(func, target)


def like(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor with the sharding of the first operand, made from its local tensor: copies, casts, ``*_like``."""
    source = args[0]
    sharding: Sharding = source._sharding
    if sharding.axis is None:
        return fallback(func, args, kwargs)
    if kwargs.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        raise NotImplementedError(
            f"{func} with {kwargs['memory_format']}: ragged tensors are row-major ({sharding})"
        )
    if sharding.partial:
        operands.check_linear(func, sharding, [source], kwargs)
    return _wrap(func(source._local_tensor, *args[1:], **kwargs), sharding)


def new(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.new_zeros(size)`` and the like: with the sharding of x for its own shape, Replicate for 0-d; else refused.

    ``new_empty`` of another shape is Replicate, as torch's DTensor makes it: it has no values yet to differ in.
    """
    empty = func._schema.name == "aten::new_empty"
    source, size = args[0], torch.Size(args[1])
    sharding: Sharding = source._sharding
    if sharding.axis is None:
        return fallback(func, args, kwargs)
    target = sharding
    other = size != sharding.shape
    if other and (not size or (empty and not sharding.partial)):
        target = sharding.replicated(size)
    elif other:
        raise NotImplementedError(
            f"{func} of shape {tuple(size)} from a ragged tensor ({sharding}): the placements of another shape "
            "are not known. Make it with ragged_shard.distribute_tensor, or a plain one with torch.zeros etc. "
            "torch.optim.Adafactor, whose state has other shapes than its parameters, cannot be used: use AdamW"
        )
    if target.partial:
        operands.check_linear(func, target, [source], kwargs)
    result = _wrap(func(source._local_tensor, target.local_shape, *args[2:], **kwargs), target)
    if not size:
        result._like = sharding  # which set_ needs
    result._scratch = empty
    return result

"""The table: which op follows which rule. Other ops are refused; `docs/ops.md` prints it.

Names are aten's; a rule covers the op's functional and in-place overloads (for pointwise ops ``out=`` too). `RULES` is
data: rule -> (what it does, what it communicates, how handlers are made, ops).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ragged_shard._ops import elementwise, norms, reduce, special, statistics, views
from ragged_shard._ops.fallback import fallback
from ragged_shard._tensor import HANDLERS, Handler, RaggedDTensor
from ragged_shard._torch_compat import bound


def _for_each(handle: Handler) -> Callable[[Any], Handler]:
    """Makes one handler the handler of each op of a rule."""
    return lambda op: handle


class Rule(NamedTuple):
    """One row of the table."""

    does: str
    communicates: str
    make: Callable[[Any], Handler]
    ops: str


RULES: dict[str, Rule] = {
    "pointwise": Rule(
        "on local tensors, in place or not; 0-d, Replicate and number operands broadcast",
        "nothing; one all_to_all for operands that are cut elsewhere",
        elementwise.pointwise,
        """abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
        bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min copy copysign cos cosh
        deg2rad digamma
        div elu elu_backward eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac ge gelu
        gelu_backward gt hardsigmoid hardswish hardtanh heaviside hypot isinf isnan isneginf isposinf le leaky_relu
        leaky_relu_backward lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
        logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num ne neg nextafter pow
        rad2deg reciprocal relu remainder round rsqrt rsub sgn sigmoid sigmoid_backward sign signbit silu
        silu_backward sin sinc sinh softplus sqrt square sub tan tanh tanh_backward threshold threshold_backward
        trunc where xlogy zero""",
    ),
    "foreach": Rule(
        "the pointwise rule for each position of the lists; ragged and other tensors may be mixed",
        "nothing; one all_to_all per list and dtype for tensors that are cut elsewhere",
        elementwise.foreach,
        """_foreach_abs _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_ceil _foreach_clamp_max
        _foreach_clamp_min _foreach_copy _foreach_cos _foreach_div _foreach_erf _foreach_exp _foreach_expm1
        _foreach_floor
        _foreach_frac _foreach_lerp _foreach_log _foreach_log10 _foreach_log1p _foreach_log2 _foreach_maximum
        _foreach_minimum _foreach_mul _foreach_neg _foreach_pow _foreach_reciprocal _foreach_round _foreach_rsqrt
        _foreach_sigmoid _foreach_sign _foreach_sin _foreach_sqrt _foreach_sub _foreach_tanh _foreach_trunc
        _foreach_zero""",
    ),
    "fused optimizer": Rule(
        "one fused step on local tensors",
        "nothing",
        elementwise.foreach,
        "_fused_adagrad _fused_adam _fused_adamw _fused_sgd",
    ),
    "copy, cast, like": Rule(
        "a tensor with the same sharding",
        "nothing",
        _for_each(elementwise.like),
        "_to_copy clone lift_fresh empty_like full_like ones_like zeros_like _pin_memory",
    ),
    "same": Rule(
        "a tensor around the same local tensor, so that a write to either counts in its version",
        "nothing",
        _for_each(views.same),
        "alias detach",
    ),
    "new": Rule(
        "a tensor of the same shape with the same sharding, or a Replicate 0-d one; `new_empty` of another shape is "
        "Replicate",
        "nothing",
        _for_each(elementwise.new),
        "new_empty new_full new_ones new_zeros",
    ),
    "view": Rule(
        "views that keep the cuts between rows",
        "nothing",
        _for_each(views.view),
        "view _unsafe_view expand squeeze unsqueeze",
    ),
    "reduce": Rule(
        "over everything or some dims: Replicate where a cut dim is reduced, else ragged",
        "one all_reduce per cut mesh axis, of the result's size; nothing if no cut dim is reduced",
        _for_each(reduce.reduction),
        "all amax amin any count_nonzero linalg_vector_norm max mean min nansum norm prod sum",
    ),
    "statistic": Rule(
        "over uncut dims on local tensors; `std`, `var`, `argmax`, `argmin`, `max` and `min` with indices, `aminmax`, "
        "`logsumexp`, softmax, `histc`, `dot`, `dist`, `mse_loss` over everything or cut dims too",
        "nothing over uncut dims; else one or two all_reduces per cut mesh axis, of the result's size",
        _for_each(statistics.statistic),
        """_log_softmax _softmax aminmax argmax argmin cummax cummin cumprod cumsum dist dot histc kthvalue logcumsumexp
        logsumexp max.dim median.dim min.dim mode mse_loss nanmedian.dim sort std std_mean topk var var_mean vdot""",
    ),
    "rows": Rule(
        "rows of a tensor that is cut between rows: views, and a single row is on its holder",
        "nothing",
        _for_each(views.rows),
        "select slice split split_with_sizes unbind",
    ),
    "foreach norm": Rule(
        "a Replicate 0-d norm for each tensor",
        "one all_reduce for all that are cut over the same ranks (one per axis if several axes cut them), 8 bytes per "
        "tensor",
        _for_each(norms.foreach_norm),
        "_foreach_norm",
    ),
    "stack": Rule(
        "0-d tensors that are replicas over the same ranks, on any meshes",
        "nothing; one all_reduce per cut mesh axis for a pending norm of a DTensor",
        _for_each(norms.stack),
        "stack",
    ),
    "unscale": Rule(
        "GradScaler's check for inf and nan",
        "one all_reduce of 4 bytes per cut mesh axis",
        _for_each(special.unscale),
        "_amp_foreach_non_finite_check_and_unscale",
    ),
    "equal": Rule(
        "torch.equal and allclose, the same answer on every rank",
        "one all_reduce of 4 bytes per cut mesh axis; before, what the pointwise rule says",
        _for_each(special.equal),
        "allclose equal",
    ),
    "random": Rule(
        "draws the full tensor from this rank's generator, keeps its range: equal seeds give the plain tensor's values",
        "nothing; one broadcast of the local tensor per mesh axis of replicas",
        _for_each(special.random),
        "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ rand_like randint_like randn_like random_ "
        "uniform_",
    ),
    "scratch": Rule(
        "`nn.init.orthogonal_`: a Replicate tensor from `new_empty`; refused for others",
        "the gather of the tensor",
        _for_each(special.scratch),
        "linalg_qr",
    ),
    "masked": Rule(
        "x[mask] = number, with a boolean mask that has the sharding of x",
        "nothing",
        _for_each(special.masked_put),
        "index_put",
    ),
    "query": Rule(
        "passed on to the local tensor", "nothing", _for_each(special.query), "is_pinned record_stream"
    ),
    "number": Rule(
        "item() of a Replicate tensor, or of a number that one rank holds",
        "nothing; one all_reduce of the number if one rank holds it",
        _for_each(special.item),
        "_local_scalar_dense",
    ),
}


def _overloads(name: str, takes_out: bool) -> list[Any]:
    """An aten op's functional and in-place overloads, with ``out=`` if the rule takes it; `max.dim` is one overload."""
    overloads = []
    name, _, only = name.partition(".")
    for spelling in (name, name + "_"):
        packet = getattr(torch.ops.aten, spelling, None)
        if packet is None:
            continue
        for overload in [only] if only else packet.overloads():
            op = getattr(packet, overload)
            arguments = op._schema.arguments
            if not any("Tensor" in str(argument.type) for argument in arguments):
                continue
            if any(a.is_out for a in arguments) and not takes_out:
                continue
            if name == "where" and overload == "default":  # that one is nonzero()
                continue
            overloads.append(op)
    return overloads


def _counting(op: Any, handle: Handler) -> Handler:
    """The handler of an op that writes, with each write in the local tensors' version counters.

    Below autograd, where handlers run, torch does not count; who keeps something made from a local tensor looks there.
    """
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]

    def handle_and_count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = handle(func, args, kwargs)
        arguments, tensors = bound(op, args, kwargs), []
        for values in [arguments[name] for name in written]:
            listed = values if isinstance(values, (list, tuple)) else (values,)
            tensors += [value._local_tensor for value in listed if isinstance(value, RaggedDTensor)]
        if tensors:
            torch.autograd.graph.increment_version(tensors)
        return result

    return handle_and_count


def _fill() -> None:
    for rule in RULES.values():
        for name in rule.ops.split():
            for op in _overloads(name, rule is RULES["pointwise"]):
                handle = rule.make(op)
                HANDLERS[op] = _counting(op, handle) if op._schema.is_mutable else handle
    HANDLERS.fallback = fallback


_fill()


def markdown() -> str:
    """The table as Markdown, as in docs/ops.md."""
    lines = ["| rule | ops | what it does | communicates |", "| --- | --- | --- | --- |"]
    for name, rule in RULES.items():
        ops = ", ".join(f"`{op}`" for op in rule.ops.split())
        lines.append(f"| {name} | {ops} | {rule.does} | {rule.communicates} |")
    return "\n".join(lines)

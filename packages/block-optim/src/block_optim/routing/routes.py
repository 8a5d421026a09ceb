"""Chooses the algorithm for each parameter of a model. The first rule that applies decides:

override           a pattern of the user matches one of the parameter's names
vector             fewer than two dimensions, or only one longer than 1: biases, norms, scales; stacks of them by name
                   (an expert's ``..._bias``, Mamba's ``A_log``); filters of depthwise convolutions
embedding          the weight of an nn.Embedding or nn.EmbeddingBag, tied heads with it, or named like one:
                   AdamW with fp32 states, also where the others' take 8 bits
head               outside all repeated blocks: named like an output projection, or a Linear with the shape of an
                   embedding; inside one (a layer that predicts further tokens) both, or called lm_head
norm               a parameter of a module whose class is a norm
matrix             everything else: Muon; convolutions flattened, other tensors of three dimensions as stacks
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from block_optim.core.base import is_first_rank
from block_optim.routing.mixed import ALGORITHMS, Kind, Mixed, check_known, kind_of, name_of

Override = str | Kind | Mapping[str, Any]  # an algorithm, or its options

_EMBEDDING_NAME = re.compile(
    r"(^|[._])(embed\w*|wte|wpe|word_embeddings|position_embeddings|tok_embeddings)([._]|$)"
)
_HEAD_NAME = re.compile(
    r"^((module|model|_orig_mod)\.)*(lm_heads?|head|output|unembed\w*|embed_out|classifier|score|output_projection)(\.\d+)?$"
)
_VECTORS_NAME = re.compile(r"((^|[._])bias|(^|\.)A_log)$")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORM_CLASS = re.compile(r"norm", re.IGNORECASE)


@dataclass(frozen=True)
class Route:
    """The algorithm for a parameter, and the reason."""

    names: tuple[str, ...]  # all names that the model has for it
    shape: tuple[int, ...]  # of the global tensor
    algorithm: str  # its name, or "none" for a parameter that does not train
    reason: str  # the rule
    # options of the rule or the override that differ from the algorithm's defaults
    options: tuple[tuple[str, Any], ...] = ()
    kind: Kind | None = None  # the algorithm's class; None for a parameter that does not train


def mixed_optimizer_for(
    model: nn.Module,
    *,
    lr: float | torch.Tensor = 1e-3,
    others: str = "adamw",
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Override] | None = None,
    decay_vectors: bool = True,
    verbose: bool = True,
) -> Mixed:
    """One optimizer for a model: its matrices to Muon; embeddings, head, norms and biases to AdamW.

    Call it after the model is sharded. The routes are printed (by rank 0) and are the result's ``routes``.

    Args:
        model: plain, or sharded by anything that keeps DTensor or ragged parameters.
        lr: for all groups, unless ``muon`` or ``adamw`` gives another.
        others: "adamw" or "adamw8bit", for all parameters that are not Muon's; embeddings have fp32 states in either.
        muon: options of `Muon`. Because the rate is shared, ``adjust_lr_fn`` is "match_rms_adamw" unless given here.
        adamw: options of the other algorithm; embeddings get the options that `AdamW` has.
        overrides: from patterns (searched in names, the first match counts) to an algorithm as in `Mixed`, or to a
            dict of ``algorithm`` and options:
            ``{r"attn\\.qkv": {"matrices": (512, 128, 128)}, r"router": "adamw"}``.
        decay_vectors: whether biases, norms and scales decay like the rest of their algorithm.
        verbose: print.

    Returns:
        A `Mixed` with named parameters, one state dict and, as ``routes``, a tuple of `Route`.

    Raises:
        ValueError: an override that matches nothing or names no algorithm; nothing to train.
    """
    routes = routes_of(model, others=others, overrides=overrides or {})
    params: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    groups: dict[Any, dict[str, Any]] = {}
    for route, options in options_by_route(routes, others, muon, adamw):
        if route.reason == "vector" and not decay_vectors:
            options["weight_decay"] = 0.0
        key = (route.algorithm, repr(sorted(options.items(), key=lambda item: item[0])))
        group = groups.setdefault(key, {"params": [], "algorithm": route.kind, **options})
        group["params"].append((route.names[0], params[route.names[0]]))
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")
    optimizer = Mixed(list(groups.values()), lr=lr)
    optimizer.routes = routes
    if verbose and is_first_rank():
        print(describe_routes(routes))
    return optimizer


def options_by_route(
    routes: Iterable[Route],
    others: str,
    muon: Mapping[str, Any] | None,
    adamw: Mapping[str, Any] | None,
) -> list[tuple[Route, dict[str, Any]]]:
    """The routes of parameters that train, each with its options by the arguments of `mixed_optimizer_for`."""
    shared = {"muon": {"adjust_lr_fn": "match_rms_adamw", **(muon or {})}, others: dict(adamw or {})}
    if others != "adamw":
        common = ("lr", "betas", "eps", "weight_decay", "maximize", "stochastic_rounding")
        shared["adamw"] = {key: value for key, value in shared[others].items() if key in common}
    result = []
    for route in routes:
        if route.kind is not None:
            options = {**shared.get(route.algorithm, {}), **dict(route.options)}
            check_known(route.kind, options.keys())
            result.append((route, options))
    return result


def routes_of(model: nn.Module, *, others: str, overrides: Mapping[str, Override]) -> tuple[Route, ...]:
    """The route of every parameter, in the model's order. Looks at names, modules and global shapes only."""
    if others not in ("adamw", "adamw8bit"):
        raise ValueError(f"others={others!r}: expected 'adamw' or 'adamw8bit'")
    patterns = {re.compile(pattern): _override(pattern, value) for pattern, value in overrides.items()}
    used: set[re.Pattern[str] | None] = set()
    names: dict[int, list[str]] = defaultdict(list)
    params: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
        params[id(parameter)] = parameter
    modules = dict(model.named_modules(remove_duplicate=False))
    tables = {tuple(m.weight.shape) for m in modules.values() if isinstance(m, _EMBEDDINGS)}
    blocks = tuple(f"{name}." for name in _repeated_blocks(modules))
    routes = []
    for key, param in params.items():
        owners = [modules[name.rpartition(".")[0]] for name in names[key]]
        match = next((p for p in patterns if any(p.search(name) for name in names[key])), None)
        used.add(match)
        if param.requires_grad:
            inside = all(name.startswith(blocks) for name in names[key])
            shaped = tuple(param.shape) in tables and any(isinstance(m, nn.Linear) for m in owners)
            algorithm, reason, options = _rule(names[key], owners, param, inside, shaped, others)
            kind: Kind | None = ALGORITHMS[algorithm]
            if match is not None:
                changes = dict(patterns[match])
                kind = kind_of(changes.pop("algorithm", "muon" if "matrices" in changes else algorithm))
                assert kind is not None
                kept = {name: value for name, value in options.items() if name in kind.all_options({})}
                reason, options = "override", {**kept, **changes}
        else:
            kind, reason, options = None, "frozen", {}
        name = "none" if kind is None else name_of(kind)
        sorted_options = tuple(sorted(options.items()))
        routes.append(Route(tuple(names[key]), tuple(param.shape), name, reason, sorted_options, kind))
    unused = [p.pattern for p in patterns if p not in used]
    if unused:
        raise ValueError(
            f"overrides {unused} match no parameter of {type(model).__name__}; names are as in named_parameters()"
        )
    return tuple(routes)


def _override(pattern: str, value: Override) -> dict[str, Any]:
    options = dict(value) if isinstance(value, Mapping) else {"algorithm": value}
    algorithm = options.get("algorithm", "muon")
    if kind_of(algorithm) is None:
        raise ValueError(
            f"overrides[{pattern!r}]: algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}, nor a subclass of "
            "BlockOptimizer"
        )
    return options


def _repeated_blocks(modules: Mapping[str, nn.Module]) -> list[str]:
    """Names of the layers that a model repeats: members of a ModuleList, or of one class in another container."""
    blocks = []
    for name, module in modules.items():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            members = {child: m for child, m in module.named_children() if any(True for _ in m.children())}
            classes = Counter(type(m) for m in members.values())
            blocks += [
                f"{name}.{child}" if name else child
                for child, m in members.items()
                if isinstance(module, nn.ModuleList) or classes[type(m)] > 1
            ]
    return blocks


def _rule(
    names: list[str], owners: list[nn.Module], param: torch.Tensor, inside: bool, shaped: bool, others: str
) -> tuple[str, str, dict[str, Any]]:
    """(algorithm, reason, options) for a parameter under its names and in the modules that have it.

    `inside`: it is in a repeated block; `shaped`: it is a Linear's weight with the shape of an embedding.
    """
    is_vector = param.ndim < 2 or sum(size > 1 for size in param.shape) < 2
    if is_vector or any(_VECTORS_NAME.search(name) for name in names):
        return others, "vector", {}
    convolutions = [m for m in owners if isinstance(m, nn.modules.conv._ConvNd)]
    if any(m.groups > 1 and param.shape[1] == 1 for m in convolutions):
        return others, "depthwise", {}
    is_embedding = any(isinstance(m, _EMBEDDINGS) for m in owners)
    if is_embedding or any(_EMBEDDING_NAME.search(name) for name in names):
        return "adamw", "embedding", {}
    modules = [name.rpartition(".")[0] for name in names]
    if not inside and (shaped or any(_HEAD_NAME.search(module) for module in modules)):
        return others, "head", {}
    own_names = [module.rpartition(".")[2] for module in modules]
    if "lm_head" in own_names or (shaped and any(_HEAD_NAME.search(name) for name in own_names)):
        return others, "head", {}
    if any(_NORM_CLASS.search(type(m).__name__) for m in owners):
        return others, "norm", {}
    if convolutions:
        return "muon", "convolution", {"matrices": "flatten"}
    return "muon", "stack" if param.ndim == 3 else "matrix", {}


def describe_routes(routes: tuple[Route, ...]) -> str:
    """A table: a line for each kind of parameter (layers' numbers as *), and the sums of each algorithm."""
    lines, tensors, numels = Counter[Any](), Counter[str](), Counter[str]()
    for route in routes:
        name = " = ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", n) for n in route.names))
        options = ", ".join(f"{key}={value!r}" for key, value in route.options)
        lines[name, route.shape, route.algorithm, route.reason, options] += 1
        tensors[route.algorithm] += 1
        numels[route.algorithm] += math.prod(route.shape)
    width = max(len(key[0]) for key in lines)
    text = [f"{'parameter':{width}}  {'shape':>18}  {'count':>5}  {'algorithm':10} why"]
    for (name, shape, algorithm, reason, options), count in lines.items():
        size = "x".join(map(str, shape)) or "()"
        text.append(
            f"{name:{width}}  {size:>18}  {count:>5}  {algorithm:10} {reason}{options and f' ({options})'}"
        )
    sums = (f"{name}: {count} tensors, {numels[name]} elements" for name, count in tensors.items())
    return "\n".join([*text, "; ".join(sums)])

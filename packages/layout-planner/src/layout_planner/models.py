"""Shapes of whole models: which tensors are gathered together, and how many layers are equal.

    ModelShape  ->  GroupShape (`count` groups of this shape)  ->  ShapeEntry (one tensor)

`load_model` knows the models of `model_configs.json`, whose numbers come from the models' public
config.json files. Names and shapes are as transformers (version 5: experts stacked in one tensor)
holds in memory, with these choices:

* Embeddings are a group, and the head with the final norm is one: all that is gathered outside the layers.
* GPT-OSS's stacked experts are `[experts, out, in]`, the row-major order of its published checkpoint.
  (transformers keeps them transposed, `[experts, in, out]`.)
* DeepSeek-V3 and Kimi-K2 are without their multi-token-prediction layer, and with the router's
  `e_score_correction_bias`, which checkpoints hold in addition to the weights.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from layout_planner._blocks import Block, Rows, Tile
from layout_planner._spec import TensorSpec

Config = dict[str, int]


@dataclass(frozen=True)
class ShapeEntry:
    """One tensor of a group.

    Attributes:
        name: unique in its group, without the layer's prefix.
        shape: dimensions in elements.
        experts: matrices (or vectors) stacked along dimension 0; 1 if it is not a stack.
    """

    name: str
    shape: tuple[int, ...]
    experts: int = 1

    @property
    def numel(self) -> int:
        """Elements in the tensor."""
        return math.prod(self.shape)

    def spec(self, block: Block) -> TensorSpec:
        """This tensor with that block.

        Args:
            block: a `Tile` becomes `Rows(tile.rows)` on a tensor without rows and columns, such as a norm.

        Raises:
            ValueError: a shape or block that `TensorSpec` refuses.
        """
        if isinstance(block, Tile) and len(self.shape) < 2:
            block = Rows(block.rows)
        return TensorSpec(self.name, self.shape, block)


@dataclass(frozen=True)
class GroupShape:
    """The shape of a group: the tensors of one transformer layer, the embeddings, or the head.

    Attributes:
        name: unique in its model; "layers.3-60" are layers 3 to 60.
        count: how many layers have exactly these tensors, each a separate group. They are planned once.
        tensors: one layer's.
    """

    name: str
    count: int
    tensors: tuple[ShapeEntry, ...]

    @property
    def numel(self) -> int:
        """Elements in one layer."""
        return sum(entry.numel for entry in self.tensors)

    def specs(self, block: Block) -> list[TensorSpec]:
        """The tensors of one layer, all with this block, ready for `plan`; see `ShapeEntry.spec`."""
        return [entry.spec(block) for entry in self.tensors]


@dataclass(frozen=True)
class ModelShape:
    """All groups of a model, in the order in which the model runs them."""

    name: str
    groups: tuple[GroupShape, ...]

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return sum(group.count * group.numel for group in self.groups)

    def group(self, name: str) -> GroupShape:
        """The group of that name. Raises ValueError, listing the names, if there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        names = ", ".join(group.name for group in self.groups)
        raise ValueError(f"{self.name} has no group {name!r}; it has {names}")


def separate_experts(model: ModelShape) -> ModelShape:
    """The model with each expert's gate, up and down projection as separate tensors.

    This is how the checkpoints of Qwen3, DeepSeek-V3 and Kimi-K2 store them, and how training code without grouped
    matrix products holds them. It pads less if there are more ranks than an expert has blocks, because a tensor no
    longer than two shards does not force its block on the shard size.

    Raises:
        ValueError: a model without stacked experts, or GPT-OSS, whose experts are stacked everywhere.
    """
    stacked = [entry for group in model.groups for entry in group.tensors if entry.experts > 1]
    if not stacked or any(entry.name.endswith("_bias") for entry in stacked):
        why = "has its experts stacked in its checkpoint too" if stacked else "has no stacked experts"
        raise ValueError(f"{model.name} {why}; separate experts are for models that store each separately")
    groups = tuple(
        replace(group, tensors=tuple(single for entry in group.tensors for single in _unstacked(entry)))
        for group in model.groups
    )
    return ModelShape(f"{model.name}, experts separate", groups)


def _unstacked(entry: ShapeEntry) -> Iterator[ShapeEntry]:
    if entry.experts == 1:
        yield entry
        return
    prefix, _, kind = entry.name.rpartition(".")
    _, rows, columns = entry.shape
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    for expert in range(entry.experts):
        for name in names:
            yield ShapeEntry(f"{prefix}.{expert}.{name}.weight", (rows // len(names), columns))


def model_names() -> list[str]:
    """The names that `load_model` knows."""
    return list(_configs())


def load_model(name: str) -> ModelShape:
    """The shape of a well-known model, from its public config.

    Raises:
        ValueError: the name is not one of `model_names()`; the message lists them.
    """
    if name not in _configs():
        raise ValueError(f"unknown model {name!r}; known models: {', '.join(model_names())}")
    fields = dict(_configs()[name])
    architecture = str(fields.pop("architecture"))
    config = {key: int(value) for key, value in fields.items()}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    return ModelShape(
        name,
        (
            GroupShape("embed", 1, (ShapeEntry("embed_tokens.weight", (vocab, hidden)),)),
            *_ARCHITECTURES[architecture](config),
            GroupShape("head", 1, (_norm("norm", hidden), ShapeEntry("lm_head.weight", (vocab, hidden)))),
        ),
    )


@cache
def _configs() -> dict[str, dict[str, int | str]]:
    text = files("layout_planner").joinpath("model_configs.json").read_text(encoding="utf-8")
    configs: dict[str, dict[str, int | str]] = json.loads(text)
    return configs


def _layers(first: int, stop: int, *modules: Iterable[ShapeEntry]) -> GroupShape:
    name = f"layers.{first}-{stop - 1}" if stop - first > 1 else f"layers.{first}"
    return GroupShape(name, stop - first, tuple(entry for entries in modules for entry in entries))


def _llama(config: Config) -> Iterator[GroupShape]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    mlp = _gated_mlp("mlp", hidden, inner)
    yield _layers(0, config["num_hidden_layers"], _attention(config), _norms(config), mlp)


def _qwen3_moe(config: Config) -> Iterator[GroupShape]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    attention = [*_attention(config), *(_norm(f"self_attn.{x}_norm", config["head_dim"]) for x in "qk")]
    router = ShapeEntry("mlp.gate.weight", (experts, hidden))
    stack = _expert_stack(experts, hidden, config["moe_intermediate_size"])
    yield _layers(0, config["num_hidden_layers"], attention, _norms(config), [router], stack)


def _gpt_oss(config: Config) -> Iterator[GroupShape]:
    hidden, inner, experts = (config[k] for k in ("hidden_size", "intermediate_size", "num_local_experts"))
    sinks = ShapeEntry("self_attn.sinks", (config["num_attention_heads"],))
    moe = [
        ShapeEntry("mlp.router.weight", (experts, hidden)),
        ShapeEntry("mlp.router.bias", (experts,)),
        ShapeEntry("mlp.experts.gate_up_proj", (experts, 2 * inner, hidden), experts),
        ShapeEntry("mlp.experts.gate_up_proj_bias", (experts, 2 * inner), experts),
        ShapeEntry("mlp.experts.down_proj", (experts, hidden, inner), experts),
        ShapeEntry("mlp.experts.down_proj_bias", (experts, hidden), experts),
    ]
    attention = [*_attention(config, bias=True), sinks]
    yield _layers(0, config["num_hidden_layers"], attention, _norms(config), moe)


def _deepseek_v3(config: Config) -> Iterator[GroupShape]:
    dense, layers, hidden = (config[k] for k in ("first_k_dense_replace", "num_hidden_layers", "hidden_size"))
    experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    mlp = _gated_mlp("mlp", hidden, config["intermediate_size"])
    yield _layers(0, dense, _latent_attention(config), _norms(config), mlp)
    router = [
        ShapeEntry("mlp.gate.weight", (experts, hidden)),
        ShapeEntry("mlp.gate.e_score_correction_bias", (experts,)),
    ]
    shared = _gated_mlp("mlp.shared_experts", hidden, config["n_shared_experts"] * inner)
    stack = _expert_stack(experts, hidden, inner)
    yield _layers(dense, layers, _latent_attention(config), _norms(config), router, stack, shared)


_ARCHITECTURES: dict[str, Callable[[Config], Iterator[GroupShape]]] = {
    "llama": _llama,
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}


def _norm(name: str, size: int) -> ShapeEntry:
    return ShapeEntry(f"{name}.weight", (size,))


def _norms(config: Config) -> Iterator[ShapeEntry]:
    yield _norm("input_layernorm", config["hidden_size"])
    yield _norm("post_attention_layernorm", config["hidden_size"])


def _attention(config: Config, *, bias: bool = False) -> Iterator[ShapeEntry]:
    hidden = config["hidden_size"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    for name, rows, columns in (
        ("q_proj", queries, hidden),
        ("k_proj", keys, hidden),
        ("v_proj", keys, hidden),
        ("o_proj", hidden, queries),
    ):
        yield ShapeEntry(f"self_attn.{name}.weight", (rows, columns))
        if bias:
            yield ShapeEntry(f"self_attn.{name}.bias", (rows,))


def _latent_attention(config: Config) -> Iterator[ShapeEntry]:
    """Multi-head latent attention: queries, and keys together with values, pass through low-rank bottlenecks."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query_rank, rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield ShapeEntry("self_attn.q_a_proj.weight", (query_rank, hidden))
    yield _norm("self_attn.q_a_layernorm", query_rank)
    yield ShapeEntry("self_attn.q_b_proj.weight", (heads * (nope + rope), query_rank))
    yield ShapeEntry("self_attn.kv_a_proj_with_mqa.weight", (rank + rope, hidden))
    yield _norm("self_attn.kv_a_layernorm", rank)
    yield ShapeEntry("self_attn.kv_b_proj.weight", (heads * (nope + value), rank))
    yield ShapeEntry("self_attn.o_proj.weight", (hidden, heads * value))


def _gated_mlp(prefix: str, hidden: int, inner: int) -> Iterator[ShapeEntry]:
    yield ShapeEntry(f"{prefix}.gate_proj.weight", (inner, hidden))
    yield ShapeEntry(f"{prefix}.up_proj.weight", (inner, hidden))
    yield ShapeEntry(f"{prefix}.down_proj.weight", (hidden, inner))


def _expert_stack(experts: int, hidden: int, inner: int) -> Iterator[ShapeEntry]:
    yield ShapeEntry("mlp.experts.gate_up_proj", (experts, 2 * inner, hidden), experts)
    yield ShapeEntry("mlp.experts.down_proj", (experts, hidden, inner), experts)

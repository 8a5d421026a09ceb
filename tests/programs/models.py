"""Models of programs: an embedding, layers of any kinds, a norm and a head. Each kind of layer is one awkward thing."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

VOCABULARY, ROWS, LENGTH = 11, 2, 3
KEEPS = (
    "detach",
    "empty_like",
    "new_zeros",
    "slice",
    "view",
    "as_strided",
    "_to_copy",
    "split",
    "clone",
)  # `Wrapped`


class Layer(nn.Module):
    """A residual layer: subclasses say what `inner` adds, and how often programs have them."""

    weight = 1.0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the input."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, chosen: Sequence[int] = ()) -> Any:
        return x + self.inner(x)


class Linear(Layer):
    weight = 4.0

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def inner(self, x):
        return torch.tanh(self.linear(x))


class Split(Layer):
    """Two matrices: what tensor parallelism cuts by columns, and what by rows."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def inner(self, x):
        return self.down(torch.tanh(self.up(x)))


class Convolution(Layer):
    def __init__(self, width: int):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def inner(self, x):
        return torch.tanh(self.convolution(x.transpose(1, 2)).transpose(1, 2))


class BatchNorm(Layer):
    """Buffers that a forward changes, each rank by its rows."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("shift", torch.linspace(0, 1, width), persistent=False)

    def inner(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2) + self.shift


class Experts(Layer):
    """Listed experts, of which a batch runs any, any number of times."""

    weight = 2.0

    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x, chosen=()):
        x = x + torch.tanh(self.first(x))
        for index in chosen:
            x = x + torch.tanh(self.experts[index](x))
        return x


class Stacked(Layer):
    """Experts in one tensor."""

    def __init__(self, width: int):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, width, width) / width)

    def forward(self, x, chosen=()):
        for index in (0, *chosen):
            x = x + torch.tanh(x @ self.stack[index])
        return x


class Scalar(Layer):
    """A 0-d parameter."""

    weight = 0.5

    def __init__(self, width: int):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(())), nn.Linear(width, width)

    def inner(self, x):
        return self.scale * torch.tanh(self.linear(x))


class Odd(Layer):
    """An empty, a prime-sized, a non-contiguous and an unused parameter."""

    weight = 2.0

    def __init__(self, width: int):
        super().__init__()
        self.empty = nn.Parameter(torch.ones(0, width))
        self.prime = nn.Parameter(torch.randn(7))
        self.turned = nn.Parameter(torch.randn(3, width).t() * 0.5)
        self.unused = nn.Parameter(torch.ones(2, 2))

    def inner(self, x):
        return torch.tanh(x @ self.turned) @ self.turned.t() + self.prime.mean() + self.empty.sum()


class TwoDtypes(Layer):
    """A parameter narrower than the others."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.narrow = nn.Parameter(torch.ones(width, dtype=torch.float32))

    def inner(self, x):
        return torch.tanh(self.linear(x) * self.narrow)


class PartlyFrozen(Layer):
    def __init__(self, width: int):
        super().__init__()
        self.frozen, self.trained = nn.Linear(width, width), nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def inner(self, x):
        return torch.tanh(self.trained(torch.tanh(self.frozen(x))))


class Twice(Layer):
    """A module that two names share, called twice."""

    def __init__(self, width: int):
        super().__init__()
        self.one = nn.Linear(width, width)
        self.other = self.one

    def inner(self, x):
        return torch.tanh(self.one(torch.tanh(self.other(x))))


class Dropout(Layer):
    """Its masks follow each batch: `World.batch`."""

    def __init__(self, width: int):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.5)

    def inner(self, x):
        return torch.tanh(self.linear(self.dropout(x)))


class TwoForwards(Layer):
    """`encode` is a forward of its own; see `systems.wrap`."""

    def __init__(self, width: int):
        super().__init__()
        self.linear, self.encoder = nn.Linear(width, width), nn.Linear(width, width)

    def encode(self, x):
        return torch.tanh(self.encoder(x))

    def inner(self, x):
        return torch.tanh(self.linear(x))


@dataclasses.dataclass
class Output:
    """What a forward may return."""

    hidden: torch.Tensor
    more: dict[str, Any]


class Structured(Layer):
    """Returns a dataclass, with a view and a detached tensor in it."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x, chosen=()):
        y, z = self.linear(x).chunk(2, -1)
        return Output(x + torch.tanh(y), {"gate": [z, (z.detach(), x[:, :1])]})


class InPlace(Layer):
    """Returns a view, which the model changes in place: `Model.advance`."""

    weight = 2.0

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, chosen=()):
        return self.linear(x).view(x.shape)


class WeightNorm(Layer):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def inner(self, x):
        return torch.tanh(self.linear(x))


class Wrapped(torch.Tensor):
    """A tensor subclass around a plain tensor, which says how it is gathered; ops give plain tensors."""

    plain: torch.Tensor

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> "Wrapped":
        wrapped = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device
        )
        wrapped.plain = plain
        return wrapped

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, context: Any, size: Any, stride: Any) -> "Wrapped":
        return Wrapped(tensors["plain"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda t: t.plain, (args, kwargs or {}))
        found = func(*args, **kwargs)
        keeps = func._schema.name.partition("::")[2] in KEEPS
        return tree_map_only(torch.Tensor, cls, found) if keeps else found

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor], None]:
        return (self.plain,), None

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: Any, metadata: None, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        if out is None:
            made = outputs[0].to(param_dtype, copy=True)
            return made, (outputs[0], made)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(outputs[0])
        return None


torch.serialization.add_safe_globals([Wrapped])  # for DCP


class Subclass(Layer):
    """A weight that is a `Wrapped` where the model is sharded: `systems.wrap`."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def inner(self, x):
        return torch.tanh(self.linear(x))


class Compiled(Layer):
    """Under `torch.compile`; see `systems.wrap`."""

    weight = 0.1

    def __init__(self, width: int):
        super().__init__()
        # As torch's error says where a backward keeps its graph.
        torch._functorch.config.donated_buffer = False
        self.linear = nn.Linear(width, width)

    def inner(self, x):
        return torch.tanh(self.linear(x))


LAYERS: dict[str, type[Layer]] = {
    "linear": Linear, "split": Split, "convolution": Convolution, "batch norm": BatchNorm, "experts": Experts,
    "stacked": Stacked, "odd": Odd, "scalar": Scalar, "two dtypes": TwoDtypes, "partly frozen": PartlyFrozen,
    "twice": Twice, "two forwards": TwoForwards, "structured": Structured, "in place": InPlace,
    "weight norm": WeightNorm, "subclass": Subclass, "dropout": Dropout, "compiled": Compiled,
}  # fmt: skip
ENDS = ("tied", "head twice", "embedding as head")


class OnPurpose(Exception):
    """What a program raises itself."""


class Model(nn.Module):
    """The model of a program.

    Attributes:
        fails: raise `OnPurpose` after this layer.
        captures: keep the output of this layer in `captured`.
    """

    def __init__(self, layers: Sequence[str], width: int, ends: str, recompute: str):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LAYERS[kind](width) for kind in layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.ends, self.recompute = ends, recompute
        self.tie()
        self.fails: int | None = None
        self.captures: int | None = None
        self.captured: torch.Tensor | None = None

    def tie(self) -> None:
        """Give the head the embedding's weight, where they are tied; a state dict that is assigned unties them."""
        if self.ends == "tied":
            self.head.weight = self.embed.weight

    def advance(self, index: int, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """Run one layer."""
        layer = self.layers[index]
        if self.recompute and torch.is_grad_enabled():
            y = checkpoint(layer, x, chosen, use_reentrant=self.recompute == "reentrant")
        else:
            y = layer(x, chosen)
        if isinstance(y, Output):
            y = y.hidden + y.more["gate"][0] * y.more["gate"][1][0] + y.more["gate"][1][1]
        if isinstance(layer, InPlace):
            y = y.clone() if self.recompute == "reentrant" else y  # torch allows no change of such an output
            y += x
            y.tanh_()
        if isinstance(layer, TwoForwards):
            y = y + layer.encode(y)
        return y

    def forward(
        self,
        tokens: torch.Tensor,
        chosen: Sequence[int] = (),
        order: Sequence[int] | None = None,
        head: bool = True,
    ) -> torch.Tensor:
        x = self.embed(tokens)
        if self.ends == "head twice":
            x = x + self.head(x).mean(-1, keepdim=True)
        for index in range(len(self.layers)) if order is None else order:
            x = self.advance(index % len(self.layers), x, chosen)
            if index == self.captures:
                self.captured = x
            if index == self.fails:
                raise OnPurpose
        x = self.norm(x)
        if self.ends == "embedding as head":
            x = x + nn.functional.linear(x, self.embed.weight).mean(-1, keepdim=True)
        return self.head(x) if head else x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, in a dtype that it has."""
    return cross_entropy(logits.flatten(0, 1).double(), targets.flatten())

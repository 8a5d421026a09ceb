"""Kinds of layers of programs: each is one awkward thing."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
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
    """A residual layer: subclasses say what `inner` adds, and how often programs have them.

    Attributes:
        keeps: whether modules read parameters that their names do not show, so that weights read back from their codes
            cannot be put there.
        casts: whether all that it computes with is cast where units have a narrower dtype.
        part: whether the model checkpoints `inner` alone.
    """

    weight = 1.0
    keeps = False
    casts = True
    part = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the input."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, chosen: Sequence[int] = ()) -> Any:
        if self.part and torch.is_grad_enabled():
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def run(self, x: torch.Tensor, chosen: Sequence[int]) -> Any:
        """The output, of the arguments that this kind of layer takes."""
        return self(x, chosen)

    def after(self, y: Any, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        """What the model makes of the output, of this input, whether a reentrant checkpoint gave it or not."""
        return y


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

    casts = False

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

    casts = False

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

    def after(self, y, x, reentrant):
        return y + self.encode(y)


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

    def after(self, y, x, reentrant):
        gate, (constant, first) = y.more["gate"]
        return y.hidden + gate * constant + first


class InPlace(Layer):
    """Returns a view, which the model changes in place."""

    weight = 2.0

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, chosen=()):
        return self.linear(x).view(x.shape)

    def after(self, y, x, reentrant):
        y = y.clone() if reentrant else y  # torch allows no change of such an output
        y += x
        return y.tanh_()


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


class Recurrent(Layer):
    """Parameters of a module that keeps them in a list as well."""

    weight, keeps = 0.6, True
    kind: Any = nn.LSTM

    def __init__(self, width: int):
        super().__init__()
        self.layer = self.kind(width, width, batch_first=True, bidirectional=self.kind is nn.GRU)

    def inner(self, x):
        return self.layer(x)[0][..., : x.shape[-1]]


class OwnSetattr(Layer):
    """Reads its weight where its `__setattr__` put it."""

    keeps = True

    def __init__(self, width: int):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width) / width)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "matrix":
            self.__dict__["kept"] = value

    def inner(self, x):
        return torch.tanh(x @ self.kept)


class Forces(Layer):
    """A forward that takes the gradient of an energy by its input, then uses parameters of the layer.

    Attributes:
        trains: whether that gradient has a graph; otherwise the energy's parameters get no gradient.
    """

    trains = True

    def __init__(self, width: int):
        super().__init__()
        self.energy, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def inner(self, x):
        if torch.is_inference_mode_enabled():  # which has no gradients
            return self.last(x)
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.energy(x)).square().sum()
            (forces,) = torch.autograd.grad(energy, [x], create_graph=self.trains)
        return self.last(forces)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """An argument whose second field its constructor does not take."""

    x: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.x)


@dataclasses.dataclass
class Late:
    """An argument with fields that are set after construction."""

    x: torch.Tensor
    mask: torch.Tensor | None = dataclasses.field(init=False, default=None)
    more: list[Any] = dataclasses.field(init=False, default_factory=list)

    @classmethod
    def of(cls, x: torch.Tensor) -> "Late":
        """One whose fields are set."""
        made = cls(x)
        made.mask = torch.arange(x.shape[-1]) % 2 == 0
        made.more += [3 * x, None]
        return made


@dataclasses.dataclass(slots=True)
class Slots:
    """An argument without a dict of attributes."""

    x: torch.Tensor
    tripled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.tripled = 3 * self.x


class Named(NamedTuple):
    """A named tuple with None in it."""

    x: torch.Tensor
    nothing: None
    first: torch.Tensor


PACKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "frozen dataclass": Frozen,
    "late fields": Late.of,
    "slots": Slots,
    "nested": lambda x: {"one": [Frozen(x), None], "other": (Late.of(x),)},
    "named tuple": lambda x: Named(x, None, x[:, :1]),
    "same twice": lambda x: [x, x],
}


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a container, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name))
    elif isinstance(tree, Mapping | tuple | list):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(item)


def mixed(tree: Any) -> torch.Tensor:
    """A sum of the tensors in a container that shows each one and its place."""
    found = list(leaves(tree))
    return sum((place * tensor for place, tensor in enumerate(found, 1)), torch.zeros(())) / len(found) ** 2


class Packed(Layer):
    """Takes a container and a tensor after it, and returns such a container."""

    weight = 0.5
    pack: Callable[[torch.Tensor], Any]

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, packed, other, *, nothing=None, chosen=()):  # type: ignore[override]
        return self.pack(other + torch.tanh(self.linear(mixed(packed))))

    def run(self, x, chosen):
        return mixed(self(self.pack(x), x / 2, nothing=None, chosen=chosen)).to(x.dtype)


def variant(base: type[Layer], **attributes: Any) -> type[Layer]:
    """A kind of layer with other attributes."""
    return type(base.__name__, (base,), attributes)


LAYERS: dict[str, type[Layer]] = {
    "linear": Linear, "split": Split, "convolution": Convolution, "batch norm": BatchNorm, "experts": Experts,
    "stacked": Stacked, "odd": Odd, "scalar": Scalar, "two dtypes": TwoDtypes, "partly frozen": PartlyFrozen,
    "twice": Twice, "two forwards": TwoForwards, "structured": Structured, "in place": InPlace,
    "weight norm": WeightNorm, "subclass": Subclass, "dropout": Dropout,
    "lstm": Recurrent, "gru": variant(Recurrent, kind=nn.GRU), "rnn": variant(Recurrent, kind=nn.RNN),
    "own setattr": OwnSetattr, "forces": Forces, "constant forces": variant(Forces, trains=False, weight=0.5),
    **{name: variant(Packed, pack=staticmethod(pack)) for name, pack in PACKS.items()},
}  # fmt: skip

"""Kinds of layers that few models have: torch's own modules, changed weights, odd arguments and results."""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .layers import LAYERS, Layer, Packed, variant


class Rare(Layer):
    weight = 0.35


class Attention(Rare):
    """Queries, keys and values in one weight, which the module passes to a function."""

    def __init__(self, width: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def inner(self, x):
        return self.attention(x, x, x)[0]


class Encoder(Rare):
    """Takes another path in evaluations, which reads weights of all its children."""

    def __init__(self, width: int):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(width, 1, 2 * width, dropout=0.0, batch_first=True)

    def inner(self, x):
        return self.encoder(x)


class _Shrunk(nn.Module):
    """A parametrization with a parameter."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, weight):
        return self.scale * torch.tanh(weight)


class Parametrized(Rare):
    """A weight that a module computes from the parameter, once in a forward where it is cached."""

    cached = False

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        parametrize.register_parametrization(self.linear, "weight", _Shrunk(width))

    def inner(self, x):
        with parametrize.cached() if self.cached else contextlib.nullcontext():
            return self.linear(torch.tanh(self.linear(x)))


class Normed(Rare):
    """A weight that a hook or a parametrization computes anew in each forward; a spectral norm changes buffers then."""

    norm: Callable[[nn.Module], nn.Module]

    def __init__(self, width: int):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old ones are deprecated
            self.linear = self.norm(nn.Linear(width, width))

    def inner(self, x):
        return torch.tanh(self.linear(x))


class Positions(Rare):
    """An embedding of positions."""

    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, width: int):
        super().__init__()
        self.table = nn.Embedding(4, width, **self.options)

    def inner(self, x):
        return self.table(torch.arange(x.shape[1], device=x.device))


class Listed(Rare):
    """Parameters in a ParameterList and in a ParameterDict."""

    def __init__(self, width: int):
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(width, width) / width for _ in range(2))
        self.vectors = nn.ParameterDict({"shift": torch.ones(width), "scale": torch.ones(width)})

    def inner(self, x):
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return x * self.vectors["scale"] + self.vectors["shift"]


class LoRA(Rare):
    """Two narrow matrices beside a frozen one."""

    def __init__(self, width: int):
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def inner(self, x):
        return torch.tanh(self.frozen(x) + self.up(self.down(x)))


class _Product(torch.autograd.Function):
    """A product that saves the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), (x.transpose(-1, -2) @ grad).sum(0)


class _LaterProduct(_Product):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)


class OwnFunction(Rare):
    """A function of autograd that saves the weight."""

    function = _Product

    def __init__(self, width: int):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width) / width)

    def inner(self, x):
        return torch.tanh(self.function.apply(x, self.matrix))


class Integers(Rare):
    """A frozen parameter of integers, or of booleans, which `systems.wrap` leaves out of units."""

    how = ""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        numbers = torch.arange(width).flip(0)
        self.integers = nn.Parameter(numbers % 2 == 0 if self.how else numbers, requires_grad=False)

    def inner(self, x):
        y = torch.tanh(self.linear(x))
        return y * self.integers if self.how else y.index_select(-1, self.integers)


class ReturnsWeight(Rare):
    """Returns its weight, or a copy of it: always where there are no gradients, as in a reentrant checkpoint."""

    copies = False

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, chosen=()):
        weight = self.linear.weight
        # Without gradients torch would make a weight the checkpoint's output.
        copies = self.copies or not torch.is_grad_enabled()
        return x + torch.tanh(self.linear(x)), weight.clone() if copies else weight

    def after(self, y, x, reentrant):
        return y[0] + y[1].mean()


class Swaps(Rare):
    """A child has another module's parameter for a while."""

    keeps = True

    def __init__(self, width: int):
        super().__init__()
        self.linear, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def inner(self, x):
        own, self.linear.weight = self.linear.weight, self.other.weight
        try:
            y = torch.tanh(self.linear(x))
        finally:
            self.linear.weight = own
        return torch.tanh(self.linear(y))


class Functional(Rare):
    """Calls its child as a function, on each row, or for a gradient by the input."""

    how = ""

    def __init__(self, width: int):
        super().__init__()
        self.linear, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def inner(self, x):
        if self.how == "vmap":
            return torch.vmap(lambda row: torch.tanh(self.linear(row)))(x)
        if self.how == "call":
            params = {name: 2 * param for name, param in self.linear.named_parameters()}
            return torch.tanh(torch.func.functional_call(self.linear, params, (x,)))
        try:
            x = torch.func.grad(lambda x: torch.tanh(self.linear(x)).square().sum())(x)
        except RuntimeError as error:  # as torch does where tensors are saved by hooks, as in a checkpoint
            if "saved tensor hooks" not in str(error):
                raise
        return self.last(x)


class KeywordOnly(Rare):
    """A tensor that has no place but its name."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, *, half, chosen=()):  # type: ignore[override]
        return x + torch.tanh(self.linear(half))

    def run(self, x, chosen):
        return self(x, half=x / 2, chosen=chosen)


class Opaque:
    """A user's own class, of which torch knows nothing."""

    def __init__(self, x: torch.Tensor):
        self.x = x


class OpaqueArgument(Rare):
    """Takes such an object."""

    casts = False

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, box, chosen=()):
        return box.x + torch.tanh(self.linear(box.x))

    def run(self, x, chosen):
        return self(Opaque(x), chosen)


class OpaqueResult(Rare):
    """Returns such an object."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, chosen=()):
        return Opaque(x + torch.tanh(self.linear(x)))

    def run(self, x, chosen):
        return self(x, chosen).x


class ViewsOfInput(Rare):
    """Returns views of its input."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, chosen=()):
        return torch.tanh(self.linear(x)), x.transpose(0, 1), x[:, :1].expand(x.shape)

    def after(self, y, x, reentrant):
        own, turned, first = y
        return own + turned.transpose(0, 1) + 0.1 * first


class ChangesInput(Rare):
    """Changes its input in place."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, chosen=()):
        x *= 0.5
        return x + torch.tanh(self.linear(x))

    def run(self, x, chosen):
        return self(x * 1, chosen)  # a recomputation begins with what the model has


LAYERS.update({
    "attention": Attention, "encoder": Encoder,
    "parametrized": Parametrized, "cached weight": variant(Parametrized, cached=True),
    "old weight norm": variant(Normed, norm=staticmethod(nn.utils.weight_norm)),
    "spectral norm": variant(
        Normed, norm=staticmethod(nn.utils.parametrizations.spectral_norm), casts=False
    ),
    "old spectral norm": variant(Normed, norm=staticmethod(nn.utils.spectral_norm), casts=False),
    "padding": variant(Positions, options={"padding_idx": 1}),
    "max norm": variant(Positions, options={"max_norm": 0.5}, casts=False),
    "sparse": variant(Positions, options={"sparse": True}, casts=False),
    "listed": Listed, "lora": LoRA,
    "own function": OwnFunction, "later context": variant(OwnFunction, function=_LaterProduct),
    "integers": Integers, "booleans": variant(Integers, how="booleans"), "swaps": Swaps,
    "returns weight": ReturnsWeight, "returns copy": variant(ReturnsWeight, copies=True),
    "function call": variant(Functional, how="call"), "vmap": variant(Functional, how="vmap"),
    "function grad": Functional,
    "keyword only": KeywordOnly, "opaque argument": OpaqueArgument, "opaque result": OpaqueResult,
    "views of input": ViewsOfInput, "changes input": ChangesInput,
    "with None": variant(
        Packed, weight=0.35,
        pack=staticmethod(lambda x: {"none": None, "list": [None, {"x": x, "more": [None, 2 * x]}], "no": ()}),
    ),
})  # fmt: skip

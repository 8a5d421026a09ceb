"""Models of programs: an embedding, layers of any kinds, a norm and a head."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from . import rare_layers  # noqa: F401 (enters its layers)
from .layers import LAYERS, VOCABULARY

ENDS = ("tied", "head twice", "embedding as head")
SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]  # by a selective checkpoint
# Arguments of a layer's checkpoint.
RECOMPUTES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reentrant": {"use_reentrant": True},
    "nested": {},
    "selective": {"context_fn": lambda: create_selective_checkpoint_contexts(SAVED)},
    "early stop off": {},
    "no rng": {"preserve_rng_state": False},
}


class OnPurpose(Exception):
    """What a program raises itself."""


class Model(nn.Module):
    """The model of a program.

    Attributes:
        fails: raise `OnPurpose` after this layer.
        captures: keep the output of this layer in `captured`.
        autocast: whether each call is under torch's autocast.
    """

    autocast = False

    def __init__(self, layers: Sequence[str], width: int, ends: str, recompute: str):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LAYERS[kind](width) for kind in layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.ends, self.recompute = ends, recompute if recompute != "part" else ""
        layer: Any
        for layer in self.layers:
            layer.part = recompute == "part"
        self.tie()
        self.fails: int | None = None
        self.captures: int | None = None
        self.captured: torch.Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return super().__call__(*args, **kwargs)

    def tie(self) -> None:
        """Give the head the embedding's weight, where they are tied; a state dict that is assigned unties them."""
        if self.ends == "tied":
            self.head.weight = self.embed.weight

    def advance(self, index: int, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """Run one layer."""
        layer: Any = self.layers[index]
        if self.recompute and torch.is_grad_enabled():
            options = {"use_reentrant": False, **RECOMPUTES[self.recompute]}
            run = layer.run
            if self.recompute == "nested":
                run = functools.partial(checkpoint, run, use_reentrant=False)
            with set_checkpoint_early_stop(self.recompute != "early stop off"):
                y = checkpoint(run, x, chosen, **options)
        else:
            y = layer.run(x, chosen)
        return layer.after(y, x, self.recompute == "reentrant")

    def forward(
        self,
        tokens: torch.Tensor,
        chosen: Sequence[int] = (),
        order: Sequence[int] | None = None,
        head: bool = True,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed(tokens) if embeds is None else embeds
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

"""What is live when in one step: a model's activations, seen on fake tensors, and a runtime's buffers around them.

    record     forward and backward of one microbatch on fake tensors -> moments: a unit is entered, left, ...
    replay     the same moments with the runtime's gathers, releases and reductions -> the peak of both together

Moments: ``enter`` and ``leave`` of forward, ``backward`` (a gradient has reached the unit's output), ``gradient`` (of
a unit's first parameter), ``done`` (of the first layer's backward; those of others are done when the next begins).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from fsdp_runtime import LiveBytes, fake_tensors

Reductions = Literal["at once", "soon", "late"]  # when they end: see `Replay`
ENDS: tuple[Reductions, ...] = get_args(Reductions)


@dataclass(frozen=True)
class Moment:
    """Something happens to a unit; `live` is the most bytes of activations from here to the next moment."""

    what: str
    unit: int  # 0 is the root, layers follow in order
    live: int


@dataclass(frozen=True)
class Buffers:
    """A unit's buffers on one rank, in bytes, one for each segment."""

    gathered: tuple[int, ...]
    reducing: tuple[int, ...]
    gradients: int  # the shard that a reduction leaves
    keeps: bool  # stays gathered between forward and backward
    received: int = 0  # next to the gathered gradients while they are reduced
    decoding: tuple[int, ...] = ()  # of codes that were gathered, until they are read back

    def without_gradients(self) -> "Buffers":
        """The same in a microbatch after which nothing is reduced."""
        return replace(self, reducing=(), gradients=0, received=0)


def record(
    make_model: Callable[[], nn.Module],
    layers_of: Callable[[nn.Module], list[nn.Module]],
    run: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    rows: int,
    seq_len: int,
    device: torch.device,
) -> list[Moment]:
    """The moments of one microbatch's forward and backward, and the bytes in addition to parameters and kept gradients.

    Counts what autograd keeps, temporaries, and each gradient until it is taken away. Nothing is computed: the model
    is made of fake tensors.

    Args:
        make_model: builds the model; called where tensors are fake.
        layers_of: the modules that are units, the root apart.
        run: (model, tokens, targets) -> loss.
        rows, seq_len: of a microbatch on one rank.
        device: whose kernels are chosen.
    """
    with fake_tensors():
        with torch.device(device):
            model = make_model()
            tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
        recorder = _Recorder()
        model.train()
        with recorder.live:
            recorder.watch(model, layers_of(model))
            loss = run(model, tokens, torch.zeros_like(tokens))
            recorder.in_backward = True
            loss.backward()
            recorder.mark("end", 0)
        return recorder.moments()


class _Recorder:
    def __init__(self) -> None:
        self.live = LiveBytes()
        self.in_backward = False
        self._marks: list[tuple[str, int]] = []
        self._peaks: list[int] = []

    def mark(self, what: str, unit: int) -> None:
        self._peaks.append(self.live.peak)
        self.live.peak = self.live.now
        self._marks.append((what, unit))

    def moments(self) -> list[Moment]:
        peaks = [*self._peaks[1:], self.live.peak]
        return [Moment(what, unit, peak) for (what, unit), peak in zip(self._marks, peaks, strict=True)]

    def watch(self, model: nn.Module, layers: list[nn.Module]) -> None:
        owner: dict[torch.Tensor, int] = {}
        for number, module in enumerate([model, *layers]):
            module.register_forward_pre_hook(self._entering(number))
            module.register_forward_hook(self._leaving(number))
            for parameter in module.parameters():
                owner[parameter] = number  # layers come after the root, which has them too
        for owned, number in owner.items():
            owned.register_post_accumulate_grad_hook(self._taking(number))

    def _entering(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self.in_backward:  # recomputed
                return
            self.mark("enter", unit)
            if unit == 1:
                args[0].register_hook(lambda grad: self.mark("done", unit))

        return hook

    def _leaving(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if not self.in_backward:
                self.mark("leave", unit)
                out[0].register_hook(lambda grad: self.mark("backward", unit))

        return hook

    def _taking(self, unit: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if ("gradient", unit) not in self._marks:
                self.mark("gradient", unit)
            parameter.grad = None

        return hook


@dataclass
class _Pool:
    """Memory of gathered buffers: a released one is kept for the next of its size, until another size is asked for."""

    live: int = 0
    parked: Counter[int] = field(default_factory=Counter)

    def lend(self, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            if self.parked[size]:
                self.parked[size] -= 1
            else:
                self.trim()
                self.live += size

    def take_back(self, sizes: tuple[int, ...]) -> None:
        self.parked.update(sizes)

    def trim(self) -> None:
        self.live -= sum(size * count for size, count in self.parked.items())
        self.parked.clear()


class Replay:
    """A step of the runtime, moment by moment, once the order of units is known.

    Args:
        units: the root first, then the layers in order.
        accumulated: gradients of an earlier microbatch are there from the beginning.
        reductions: when they are over: "at once", when the next unit's first gradient comes ("soon"), or when its
            last has come ("late").

    One unit is gathered ahead; one reduction is under way while the backward goes on. A reduction that ends at once
    counts without its scratch: a lower bound, because a transport may hold that where no meter of tensors sees it.

    Attributes:
        peak: the most bytes of activations and buffers together.
        buffers_peak: the most bytes of gathered buffers.
    """

    def __init__(
        self, units: list[Buffers], accumulated: bool = False, reductions: Reductions = "late"
    ) -> None:
        self.units = units
        self._reductions = reductions
        self.peak = self.buffers_peak = 0
        self._pool = _Pool()
        self._gradients = sum(unit.gradients for unit in units) if accumulated else 0
        self._gathered: set[int] = set()
        self._encoded: set[int] = set()  # of the gathered, those not read back
        self._running: int | None = None
        self._flying: int | None = None
        self._received = 0

    def run(self, moments: list[Moment]) -> "Replay":
        """Go through all moments."""
        for moment in moments:
            getattr(self, f"_{moment.what}")(moment.unit)
            self.buffers_peak = max(self.buffers_peak, self._pool.live)
            self.peak = max(self.peak, moment.live + self._pool.live + self._gradients + self._received)
        return self

    def _gather(self, unit: int) -> None:
        if unit not in self._gathered:
            self._gathered.add(unit)
            self._encoded.add(unit)
            self._pool.lend(self.units[unit].gathered)
            self._pool.lend(self.units[unit].decoding)

    def _use(self, unit: int) -> None:
        """Gather a unit, and read its codes back."""
        self._gather(unit)
        self._note_buffers()
        if unit in self._encoded:
            self._encoded.discard(unit)
            self._pool.take_back(self.units[unit].decoding)

    def _note_buffers(self) -> None:
        self.buffers_peak = max(self.buffers_peak, self._pool.live)

    def _release(self, unit: int) -> None:
        if unit in self._gathered:
            self._gathered.discard(unit)
            self._pool.take_back(self.units[unit].gathered)

    def _ahead(self, units: range) -> None:
        following = [unit for unit in units if unit not in self._gathered]
        if following:
            self._gather(following[0])

    def _enter(self, unit: int) -> None:
        self._use(unit)
        self._ahead(range(unit + 1, len(self.units)))

    def _leave(self, unit: int) -> None:
        if not self.units[unit].keeps:
            self._release(unit)
            if unit == len(self.units) - 1:
                self._pool.trim()

    def _backward(self, unit: int) -> None:
        self._finish_running()
        self._running = unit or None
        self._use(unit)
        before = unit or len(self.units)
        self._ahead(range(before - 1, 0, -1))

    def _gradient(self, unit: int) -> None:
        if self._reductions == "soon":
            self._end_reduction()
        self._pool.lend(self.units[unit].reducing)

    def _done(self, unit: int) -> None:
        self._finish_running()

    def _finish_running(self) -> None:
        if self._running is not None:
            self._finish(self._running)
            self._running = None

    def _finish(self, unit: int) -> None:
        """A unit's backward is over: its parameters go, its gradients are reduced."""
        self._release(unit)
        if unit <= 1:  # nothing more is gathered, and the runtime keeps no blocks for it
            self._pool.trim()
        self._end_reduction()
        self._received = self.units[unit].received
        self._flying = unit
        self._gradients += self.units[unit].gradients
        if self._reductions == "at once":
            self._end_reduction()
        # The new shard is there while the gathered gradients still are.
        self.peak = max(self.peak, self._pool.live + self._gradients + self._received)

    def _end_reduction(self) -> None:
        """The reduction that was under way is over."""
        if self._flying is not None:
            self._pool.take_back(self.units[self._flying].reducing)
        self._flying, self._received = None, 0

    def _end(self, unit: int) -> None:
        self._finish_running()
        self._pool.trim()
        self._finish(0)
        self._end_reduction()
        self._pool.trim()

"""Peak memory of a step on paper: activations recorded on fake tensors, and the buffers in use at each moment.

Moments: ``enter`` and ``leave`` of forward, ``backward`` (a gradient has reached the unit's output), ``gradient`` (of
a unit's first parameter), ``done`` (of the first layer's backward; those of others are done when the next begins).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_runtime.memory import LiveBytes, UnitMemory, fake_tensors


@dataclass(frozen=True)
class Moment:
    """Something happens to a unit; `live` is the most bytes of activations from here to the next moment."""

    what: str
    unit: int  # 0 is the root, layers follow in order
    live: int


def record(
    make_model: Callable[[], nn.Module],
    layers_of: Callable[[nn.Module], list[nn.Module]],
    run: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    rows: int,
    seq_len: int,
    device: torch.device,
) -> list[Moment]:
    """The moments of one microbatch's forward and backward, and the bytes in addition to parameters and kept gradients.

    Counts what autograd keeps, temporaries, and each gradient until it is taken away. Nothing is computed: the model
    is made of fake tensors.

    Args:
        make_model: builds the model; called where tensors are fake and of `dtype` by default.
        layers_of: the modules that are units, the root apart.
        run: (model, tokens, targets) -> loss.
        dtype: of the parameters.
        rows, seq_len: of a microbatch on one rank.
        device: whose kernels are chosen.
    """
    before = torch.get_default_dtype()
    with fake_tensors():
        try:
            torch.set_default_dtype(dtype)
            with torch.device(device):
                model = make_model()
                tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
        finally:
            torch.set_default_dtype(before)
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
                args[0].register_hook(lambda grad: self.mark("done", unit))  # the layers' input

        return hook

    def _leaving(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if not self.in_backward:
                self.mark("leave", unit)
                tensor = out if isinstance(out, torch.Tensor) else out[0]
                tensor.register_hook(lambda grad: self.mark("backward", unit))

        return hook

    def _taking(self, unit: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if ("gradient", unit) not in self._marks:
                self.mark("gradient", unit)
            parameter.grad = None

        return hook


def without_activations(layers: int) -> list[Moment]:
    """The moments of a model of so many layers whose activations are not known."""
    numbers = range(1, layers + 1)
    forward = [("enter", 0), *((what, n) for n in numbers for what in ("enter", "leave")), ("leave", 0)]
    backward = [(what, n) for n in reversed(numbers) for what in ("backward", "gradient")]
    marks = [*forward, ("backward", 0), ("gradient", 0), *backward, ("done", 1), ("end", 0)]
    return [Moment(what, unit, 0) for what, unit in marks]


def step_peaks(units: Sequence[UnitMemory], moments: list[Moment]) -> tuple[int, int]:
    """The most bytes of a step with activations, buffers and new gradient shards; and of buffers alone.

    One unit is gathered ahead; one reduction runs while backward continues, until the next unit's last gradient.
    Released buffers stay in the pool until the pool is trimmed.

    Args:
        units: the root first, then the layers in order.
        moments: of one microbatch.
    """
    last, pool, buffers, peak = len(units) - 1, 0, 0, 0
    for moment in moments:
        used, shards = _used(units, moment)
        trimmed = moment.what in ("done", "end") or (moment.what == "leave" and moment.unit in (0, last))
        pool = used if trimmed else max(pool, used)
        buffers, peak = max(buffers, pool), max(peak, moment.live + pool + shards)
    return peak, buffers


def _used(units: Sequence[UnitMemory], moment: Moment) -> tuple[int, int]:
    """Bytes of the buffers in use at a moment; and of new gradient shards and scratch."""
    what, unit, last = moment.what, moment.unit, len(units) - 1
    kept = {number for number in range(1, last + 1) if units[number].kept_after_forward}
    gathered, encoded, reducing, running, shards = {0}, set[int](), set[int](), 0, 0
    if what == "enter":
        ahead = min(unit + 1, last)
        gathered |= {unit, ahead} | {number for number in kept if number < unit}
        encoded = {ahead} - {unit}
    elif what == "leave":
        gathered |= {number for number in kept if number <= (unit or last)}
    else:
        if what in ("backward", "gradient"):
            unit = unit or last + 1  # the root's backward comes first
            in_order = [number for number in range(last, 0, -1) if number not in kept]
            started = in_order[: last - unit + 2]  # gathered for backward until now
            encoded = {number for number in started if number < unit}
            gathered |= {number for number in (*kept, *started) if number <= unit}
        else:
            unit = 0
        running = unit + 1 if unit < last else 0
        reducing = {0, running} | ({unit} if what == "gradient" and unit <= last else set())
        shards = sum(each.gradients for each in units[unit + 1 :])
    buffers = [
        *(size for number in gathered for size in units[number].gathered),
        *(size for number in encoded for size in units[number].decoding),
        *(size for number in reducing for size in units[number].reducing),
    ]
    return sum(buffers), shards + (units[running].scratch if running else 0)

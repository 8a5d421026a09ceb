"""Bytes: what a pass over a model will hold, worked out without memory, and what a step really held.

Both count every storage from its allocation to its free, rounded by no allocator: live bytes.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._torch_compat import fake_mode, memory_events

_MARK = "fsdp_train::measured_step"


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make inside it, until they are freed; real, fake and meta tensors alike."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(value)._cdata for value in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for value in _tensors(out):
            storage = _storage(value)
            if storage._cdata not in given:  # else a view, or written in place
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._sizes or not nbytes:
            return
        self._sizes[key] = nbytes
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(value: torch.Tensor) -> torch.UntypedStorage:
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.untyped_storage()


def activation_bytes(
    make_model: Callable[[], nn.Module],
    run: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    rows: int,
    seq_len: int,
    device: torch.device,
) -> int:
    """Peak bytes of one microbatch's forward and backward beside parameters and gradients at rest.

    Activations that autograd keeps, temporaries, and each gradient until it is taken away (as a sharded runtime does).
    The model runs on fake tensors: nothing is allocated, nothing is computed.

    Args:
        make_model: builds the model; called where tensors are fake.
        run: (model, tokens, targets) -> loss.
        rows, seq_len: of a microbatch on one rank.
        device: whose kernels are chosen.
    """
    with fake_mode():
        with torch.device(device):
            model = make_model()
            tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        model.train()
        with LiveBytes() as live:
            run(model, tokens, torch.zeros_like(tokens)).backward()
        return live.peak


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class StepMeter:
    """The peak of live bytes during one step of a run: of torch's CPU allocator, from a profile, or of CUDA's.

    On CPU everything since the meter was made is recorded, so make it before the model and measure an early step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._profile: Any = None
        self.peak: int | None = None
        self.rest: int | None = None  # live bytes when the step began
        if device.type == "cpu":
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
            self._profile.__enter__()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure what happens inside; once."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.rest = torch.cuda.memory_allocated(self.device)
            yield
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device)
            return
        with record_function(_MARK):
            yield
        self._profile.__exit__(None, None, None)
        self.rest, self.peak = peak_after_mark(memory_events(self._profile))
        self._profile = None


def peak_after_mark(events: list[tuple[int, int, str]]) -> tuple[int, int]:
    """Live bytes at the mark, and the most there were from it on."""
    now, rest, peak = 0, None, 0
    for _, nbytes, name in events:
        if name == _MARK:
            rest = peak = now
            continue
        now += nbytes
        if rest is not None:
            peak = max(peak, now)
    assert rest is not None, "the step was not profiled"
    return rest, peak

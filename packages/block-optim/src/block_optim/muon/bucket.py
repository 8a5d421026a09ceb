"""One bucket of Muon's matrices on one rank: pack, compute, send back, apply.

gradient, momentum          lerp, cast to bf16               Newton-Schulz           add to the parameter
local runs      ----------> packed: the owner's stack if --> stacks of equal     --> local runs, from the
                            this rank owns the matrix,       shapes, in place        same packed views
                            else the exchange's `parts`
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from block_optim.core._torch_compat import foreach_add_, foreach_copy_, foreach_lerp_, foreach_mul_
from block_optim.core.exchange import TransferStream, Wait, no_wait
from block_optim.core.params import Group
from block_optim.core.rounding import NarrowWriter, is_narrow
from block_optim.core.scratch import Scratch
from block_optim.muon.layout import BucketLayout, LocalRun
from block_optim.muon.normuon import RowScaling

Orthogonalize = Callable[[torch.Tensor, Group, Scratch], object]
LearningRate = float | torch.Tensor  # a tensor is on the CPU


class Bucket:
    """Matrices of one parameter group, whose options are read in every step, that are exchanged together."""

    def __init__(
        self, layout: BucketLayout, group: Group, orthogonalize: Orthogonalize, lane: TransferStream
    ) -> None:
        self.group, self.number, self._orthogonalize = group, layout.number, orthogonalize
        self._layout, self._lane, self._write = layout, lane, NarrowWriter()
        self._rows = RowScaling(layout) if group["normuon"] else None
        # All ranks agree on which of these have gradients, so all of them take part in a transfer.
        self._exchanged = frozenset(m.param for m in layout.matrices if m.bytes_sent)
        self._exchanges = [e for e in (layout.side, layout.exchange) if e is not None]
        self._active: frozenset[int] = frozenset()

    def send(self, active: frozenset[int]) -> Wait:
        """Begin a step of the parameters with these indices: pack the local runs, and send them to the owners.

        One all_to_all_single (with NorMuon a second, small one), unless nothing is exchanged; the result waits for it.
        """
        self._active = active
        by_dtype: dict[torch.dtype, list[LocalRun]] = defaultdict(list)
        for run in self._layout.local_runs:
            if run.param.index in active and (run.own or not self._layout.copies):
                by_dtype[run.param.momentum.dtype].append(run)
        for runs in by_dtype.values():
            self._pack(runs)
        if not self._exchanged & active:
            return no_wait
        if self._rows is not None and not self._layout.copies:
            self._rows.pack()
        waits = [e.to_owners(self._lane) for e in self._exchanges]
        return lambda: [wait() for wait in waits]

    def send_back(self) -> Wait:
        """Send the updates to where the matrices are held; returns the wait. As `send`, backwards."""
        if not self._exchanged & self._active:
            return no_wait
        waits = [e.back(self._lane) for e in self._exchanges]
        return lambda: [wait() for wait in waits]

    def _pack(self, runs: list[LocalRun]) -> None:
        """Round to bf16 the momentum, or with Nesterov the gradient moved towards it; runs are of one dtype."""
        mu, nesterov = self.group["momentum"], self.group["nesterov"]
        packed = [run.packed for run in runs]
        momenta = [run.of(run.param.momentum) for run in runs]
        if not nesterov:
            foreach_copy_(packed, momenta)
            return
        values = self._layout.buffers("pack", runs, runs[0].param.momentum.dtype)
        foreach_copy_(values, [run.of(run.param.grad) for run in runs])
        foreach_lerp_(values, momenta, mu)
        foreach_copy_(packed, values)

    def compute(self) -> None:
        """Orthogonalise this rank's own matrices. Communicates nothing."""
        arrived = [run for run in self._layout.remote_runs if self._is_active(run.number)]
        if arrived:
            foreach_copy_([run.stack for run in arrived], [run.packed for run in arrived])
        for stack, own in self._layout.stacks:
            for matrix, i in zip(stack, own, strict=True):
                if self._is_active(i):
                    self._orthogonalize(matrix, self.group, self._layout.scratch)
        for i in self._layout.own:
            if self._rows is not None and self._is_active(i):
                self._rows.update_moments(i)
        if arrived:
            foreach_copy_([run.packed for run in arrived], [run.stack for run in arrived])

    def _is_active(self, number: int) -> bool:
        return self._layout.matrices[number].param in self._active

    def apply(self, own: bool, lr: LearningRate) -> None:
        """Decay weights and add the updates: of this rank's own matrices, or of the others'. Communicates nothing."""
        runs = [run for run in self._layout.local_runs if run.own == own and run.param.index in self._active]
        if not runs:
            return
        decay = lr * self.group["weight_decay"]
        by_ratio: dict[tuple[float, bool], list[LocalRun]] = defaultdict(list)
        for run in runs:
            m = self._layout.matrices[run.number].matrix
            ratio = lr_ratio(self.group["adjust_lr_fn"], m.rows, m.columns)
            by_ratio[ratio, is_narrow(run.param.local.dtype)].append(run)
        for (ratio, narrow), members in by_ratio.items():
            alpha = float(-lr * ratio)
            self._apply(members, alpha, decay, narrow)

    def _apply(self, runs: Sequence[LocalRun], alpha: float, decay: LearningRate, narrow: bool) -> None:
        weights = own = [run.of(run.param.local) for run in runs]
        if narrow:  # decayed and added to in fp32, and rounded once, wherever they are cut
            weights = self._layout.buffers("apply", runs, torch.float32)
            foreach_copy_(weights, own)
        if self.group["cautious_weight_decay"]:
            self._decay_cautiously(runs, weights, float(decay))
        else:
            foreach_mul_(weights, float(1 - decay))
        updates = [run.packed for run in runs] if self._rows is None else self._rows.scaled(runs)
        if updates[0].dtype != weights[0].dtype:  # on CUDA, mixed dtypes would be a kernel a tensor
            copies = self._layout.buffers("rescaled", runs, weights[0].dtype)
            foreach_copy_(copies, updates)
            updates = copies
        foreach_add_(weights, updates, alpha=alpha)
        if narrow:
            for run, wide, weight in zip(runs, weights, own, strict=True):
                step = 0 if run.param.steps is None else int(run.param.steps)
                self._write(run.param.param, wide, weight, run.low, step)

    def _decay_cautiously(self, runs: Sequence[LocalRun], weights: list[torch.Tensor], amount: float) -> None:
        """Decay only where the update shrinks the weight anyway (Chen et al., Cautious Weight Decay)."""
        factors = self._layout.buffers("decay", runs, torch.float32)
        for factor, run, weight in zip(factors, runs, weights, strict=True):
            factor.copy_(run.packed)
            torch.mul(factor, weight, out=factor)
            torch.ge(factor, 0, out=factor)
            factor.mul_(-amount).add_(1)
            weight.mul_(factor)


def lr_ratio(adjust: str | None, rows: int, columns: int) -> float:
    """Learning-rate multiplier of a matrix, by its shape (`adjust_lr_fn`)."""
    if adjust is None or adjust == "original":
        return float(max(1.0, rows / columns) ** 0.5)
    if adjust == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)
    if adjust == "spectral_unclamped":
        return float((rows / columns) ** 0.5)
    assert adjust == "none"
    return 1.0


def run_pipeline(buckets: list[Bucket], active: frozenset[int], rates: Mapping[int, LearningRate]) -> None:
    """A step: the next bucket's transfer and the last one's return run during this one's Newton-Schulz.

    Buckets are in an order that all ranks share; `rates` are by the id of a parameter group.
    """
    if not buckets:
        return
    arrive, last = buckets[0].send(active), None
    returned: Wait = no_wait
    for i, bucket in enumerate(buckets):
        following = buckets[i + 1].send(active) if i + 1 < len(buckets) else no_wait
        arrive()
        bucket.compute()
        leave = bucket.send_back()
        bucket.apply(own=True, lr=rates[id(bucket.group)])
        returned()
        if last is not None:
            last.apply(own=False, lr=rates[id(last.group)])
        arrive, returned, last = following, leave, bucket
    returned()
    buckets[-1].apply(own=False, lr=rates[id(buckets[-1].group)])

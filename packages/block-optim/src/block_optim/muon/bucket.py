"""One bucket of Muon's matrices on one rank: pack, compute, send back, apply.

gradient, momentum          lerp, cast to bf16               Newton-Schulz           add to the parameter
local runs      ----------> packed: the owner's stack if --> stacks of equal     --> local runs, from the
                            this rank owns the matrix,       shapes, in place        same packed views
                            else the exchange's `parts`
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress

import torch

from block_optim.core import device as devices
from block_optim.core._torch_compat import foreach_add_, foreach_copy_, foreach_lerp_, foreach_mul_
from block_optim.core.exchange import TransferStream, Wait, nothing
from block_optim.core.params import Group
from block_optim.core.precision import NarrowWriter, is_narrow
from block_optim.core.skip import portions, unless
from block_optim.muon.layout import BucketLayout, LocalRun
from block_optim.muon.newton_schulz import Recipe, orthogonalize_
from block_optim.muon.normuon import RowScaling

_LOG = logging.getLogger("block_optim")

LearningRate = float | torch.Tensor  # a tensor is on the CPU


class Bucket:
    """Matrices of one parameter group that are exchanged together.

    Args:
        layout: the bucket's memory.
        group: the parameter group, whose options are read in every step.
        recipe: what Newton-Schulz does.
        lane: where transfers run.
    """

    def __init__(self, layout: BucketLayout, group: Group, recipe: Recipe, lane: TransferStream) -> None:
        self.group, self.recipe, self.number = group, recipe, layout.number
        self._layout, self._lane, self._write = layout, lane, NarrowWriter()
        self._rows = RowScaling(layout, group) if group["normuon"] else None
        # All ranks agree on which of these have gradients, so all of them take part in a transfer.
        self._exchanged = frozenset(m.param for m in layout.matrices if m.bytes_sent)
        self._exchanges = [e for e in (layout.side, layout.exchange) if e is not None]
        self._active: frozenset[int] = frozenset()
        self._skip: torch.Tensor | None = None
        self._fell_back = 0
        # Checks of the last step's results, on their way from the device, and the numbers of their matrices.
        self._checks: list[tuple[devices.HostFuture, list[int]]] = []
        self._distrusted: set[int] = set()

    # ------------------------------------------------------------- transfers

    def send(self, active: frozenset[int], found_inf: torch.Tensor | None = None) -> Wait:
        """Begin a step of the parameters with these indices: pack the local runs, and send them to the owners.

        Communicates: one all_to_all_single (with NorMuon a second, small one), unless nothing is exchanged.

        Returns:
            waits for what is owned here.
        """
        self._active, self._skip = active, found_inf
        by_kind: dict[tuple[bool, torch.dtype], list[LocalRun]] = defaultdict(list)
        for run in self._layout.local_runs:
            if run.param.index in active and (run.own or not self._layout.copies):
                by_kind[run.param.cast, run.param.momentum.dtype].append(run)
        for runs in by_kind.values():
            self._pack(runs)
        if not self._exchanged & active:
            return nothing
        if self._rows is not None and not self._layout.copies:
            self._rows.pack()
        waits = [e.to_owners(self._lane) for e in self._exchanges]
        return lambda: [wait() for wait in waits]

    def send_back(self) -> Wait:
        """Send the updates to where the matrices are held; returns the wait. As `send`, backwards."""
        if not self._exchanged & self._active:
            return nothing
        waits = [e.back(self._lane) for e in self._exchanges]
        return lambda: [wait() for wait in waits]

    def _pack(self, runs: list[LocalRun]) -> None:
        """Round to bf16 the momentum, or with Nesterov the gradient moved towards it; runs are of one dtype."""
        mu, nesterov = self.group["momentum"], self.group["nesterov"]
        packed = [run.packed for run in runs]
        if runs[0].param.cast:
            for run in runs:
                self._pack_cast(run, mu, nesterov)
            return
        momenta = [run.momentum for run in runs]
        if not nesterov:
            foreach_copy_(packed, momenta)
            return
        values = self._layout.buffers("pack", runs, runs[0].param.momentum.dtype)
        foreach_copy_(values, [run.grad for run in runs])
        foreach_lerp_(values, momenta, mu)
        foreach_copy_(packed, values)

    def _pack_cast(self, run: LocalRun, mu: float, nesterov: bool) -> None:
        """Pack momentum that has another dtype than the gradient, through a wide copy."""
        scratch, shape = self._layout.scratch, (run.high - run.low,)
        value = scratch.take("pack", shape, run.param.wide)
        momentum = scratch.take("cast", shape, run.param.wide)
        momentum.copy_(run.param.momentum[run.low : run.high])
        if nesterov:
            momentum = value.copy_(run.param.grad[run.low : run.high]).lerp_(momentum, mu)
        run.packed.copy_(momentum.view(run.packed.shape))

    # ------------------------------------------------------------- compute

    def compute(self) -> None:
        """Orthogonalise this rank's own matrices. Communicates nothing."""
        self._read_checks()
        arrived = [run for run in self._layout.remote_runs if self._is_active(run.number)]
        if arrived:
            foreach_copy_([run.stack for run in arrived], [run.packed for run in arrived])
        for stack, own in self._layout.stacks:
            active = [self._is_active(i) for i in own]
            if all(active) and not self._distrusted.intersection(own):
                self._orthogonalize(stack, own, self.recipe)
                continue
            for k, i in enumerate(own):
                if active[k]:
                    recipe = replace(self.recipe, method="standard") if i in self._distrusted else self.recipe
                    self._orthogonalize(stack[k : k + 1], [i], recipe)
        for i in self._layout.own:
            if self._rows is not None and self._is_active(i):
                self._rows.update_moments(i, self._skip)
        if arrived:
            foreach_copy_([run.packed for run in arrived], [run.stack for run in arrived])

    def _orthogonalize(self, stack: torch.Tensor, own: list[int], recipe: Recipe) -> None:
        result = orthogonalize_(stack, recipe, self._layout.scratch)
        if isinstance(result, int):
            self._fell_back += result
        else:  # not of a step that is skipped
            failed = result if self._skip is None else result & (self._skip == 0)
            self._checks.append((devices.copy_to_host_async(failed), own))

    def _read_checks(self) -> None:
        """Fall back from the Gram form for matrices whose result failed the check on the device in the last step."""
        for failed, own in self._checks:
            for i in compress(own, failed.read().tolist()):
                m = self._layout.matrices[i]
                _LOG.warning(
                    "Gram Newton-Schulz of %s failed its check; the standard form replaces it", m.name
                )
                self._distrusted.add(i)
                self._fell_back += 1
        self._checks.clear()

    @property
    def fell_back(self) -> int:
        """Number of matrices orthogonalised by a safer method. Waits for the device."""
        self._read_checks()
        return self._fell_back

    def _is_active(self, number: int) -> bool:
        return self._layout.matrices[number].param in self._active

    # ------------------------------------------------------------- apply

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
            by_ratio[ratio, is_narrow(run.local.dtype)].append(run)
        received = self._rows is not None and not own  # second moments, too
        for (ratio, narrow), members in by_ratio.items():
            alpha = float(-lr * ratio)
            for portion in portions(self._skip, members, lambda run: run.local.nbytes):
                written = [run.local for run in portion] + [run.rows for run in portion if received]
                with unless(self._skip, written):
                    self._apply(portion, alpha, decay, narrow)

    def _apply(self, runs: Sequence[LocalRun], alpha: float, decay: LearningRate, narrow: bool) -> None:
        weights = [run.local for run in runs]
        if narrow:  # decayed and added to in fp32, and rounded once, wherever they are cut
            weights = self._layout.buffers("apply", runs, torch.float32)
            foreach_copy_(weights, [run.local for run in runs])
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
            for run, wide in zip(runs, weights, strict=True):
                step = 0 if run.param.steps is None else int(run.param.steps)
                self._write(run.param.param, wide, run.local, run.low, step)

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


def run_pipeline(
    buckets: list[Bucket],
    active: frozenset[int],
    rates: Mapping[int, LearningRate],
    found_inf: torch.Tensor | None = None,
) -> None:
    """A step: the next bucket's transfer and the last one's return run during this one's Newton-Schulz.

    Args:
        buckets: in an order that all ranks share.
        active: the indices of the parameters to update.
        rates: the learning rate of each parameter group, by the id of its dict.
        found_inf: as in `StepGradients`.
    """
    if not buckets:
        return
    arrive, last = buckets[0].send(active, found_inf), None
    returned: Wait = nothing
    for i, bucket in enumerate(buckets):
        following = buckets[i + 1].send(active, found_inf) if i + 1 < len(buckets) else nothing
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

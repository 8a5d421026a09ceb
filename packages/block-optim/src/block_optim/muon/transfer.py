"""Momenta to the owners of matrices, and updates back."""

from collections import defaultdict

import torch

from block_optim.core._torch_compat import foreach_copy_, foreach_lerp_
from block_optim.core.exchange import TransferStream, Wait, nothing
from block_optim.core.params import Group
from block_optim.muon.layout import BucketLayout, LocalRun
from block_optim.muon.normuon import RowScaling


class Transfer:
    """The transfers of one bucket.

    Args:
        layout: the bucket's memory.
        group: the parameter group, whose options are read in every step.
        rows: NorMuon's second moments, if there are any.
        lane: where transfers run.
    """

    def __init__(
        self, layout: BucketLayout, group: Group, rows: RowScaling | None, lane: TransferStream
    ) -> None:
        self._layout, self._group, self._rows, self._lane = layout, group, rows, lane
        # All ranks agree on which of these have gradients, so all of them take part in a transfer.
        self._exchanged = frozenset(m.param for m in layout.matrices if m.bytes_sent)
        self._exchanges = [e for e in (layout.side, layout.exchange) if e is not None]

    def send(self, active: frozenset[int]) -> Wait:
        """Pack the local runs and start the transfer to the owners; returns the wait for what is owned here.

        Communicates: one all_to_all_single (with NorMuon a second, small one), unless nothing is exchanged.
        """
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

    def send_back(self, active: frozenset[int]) -> Wait:
        """Start the transfer of the updates to where the matrices are held; returns the wait. As `send`, backwards."""
        if not self._exchanged & active:
            return nothing
        waits = [e.back(self._lane) for e in self._exchanges]
        return lambda: [wait() for wait in waits]

    def _pack(self, runs: list[LocalRun]) -> None:
        """Round to bf16 the momentum, or with Nesterov the gradient moved towards it; runs are of one dtype."""
        mu, nesterov = self._group["momentum"], self._group["nesterov"]
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
        """Pack momentum that has another dtype than the gradient, through fp32."""
        scratch, shape = self._layout.scratch, (run.high - run.low,)
        value = scratch.take("pack", shape, torch.float32)
        momentum = scratch.take("cast", shape, torch.float32)
        momentum.copy_(run.param.momentum[run.low : run.high])
        if nesterov:
            momentum = value.copy_(run.param.grad[run.low : run.high]).lerp_(momentum, mu)
        run.packed.copy_(momentum.view(run.packed.shape))

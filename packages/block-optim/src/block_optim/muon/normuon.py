"""NorMuon (Li et al., arXiv 2510.05491): each row of an update is divided by the root of its second moment.

    v <- 0.95 v + 0.05 mean(O^2) of a row
    update = c O / (sqrt(v) + eps), with c such that its Frobenius norm is sqrt(min(rows, columns)), as of an
             orthogonal matrix

The moments are kept where the rows are held, so that checkpoints reshard them. They go to the matrix's owner and back
in a second exchange, which also carries c. Where every rank holds them all, only the owner's new ones travel.
"""

from collections.abc import Sequence

import torch

from block_optim.muon.layout import STACK_SLOTS, BucketLayout, LocalRun

BETA2, EPS = 0.95, 1e-8  # the paper's


class RowScaling:
    """NorMuon's part of one bucket."""

    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout
        name = f"row scale {layout.number % STACK_SLOTS}"
        self._factors = layout.scratch.take(name, (len(layout.matrices),), torch.float32)

    def pack(self) -> None:
        """Copy the moments of matrices that other ranks own into the side exchange."""
        side = self._layout.side
        for run in self._layout.local_runs:
            if side is not None and not run.own:
                side.parts[run.number][run.side : run.side + len(run.rows)].copy_(run.rows)

    def update_moments(self, i: int) -> None:
        """Advance the second moments of the rows of matrix ``i``, on its owner, and compute its factor c."""
        layout = self._layout
        m, take = layout.matrices[i].matrix, layout.scratch.take
        v, s, t = (take(f"rows {name}", (m.rows,), torch.float32) for name in "vst")
        # Where the moments are: on this rank, and (as they arrived) of rows on other ranks.
        places = [(run.row, run.rows) for run in layout.local_runs if run.number == i]
        places += [(r.row, r.rows) for r in layout.remote_runs if r.number == i and r.rows is not None]
        for row, rows in places:
            v[row : row + len(rows)].copy_(rows)
        matrix = layout.own[i].view(m.rows, m.columns)
        torch.linalg.vector_norm(matrix, dim=-1, dtype=torch.float32, out=s)
        s.square_().div_(m.columns)
        v.lerp_(s, 1 - BETA2)
        torch.sqrt(v, out=t).add_(EPS).square_()
        c = self._factors[i]
        torch.sum(s.div_(t), dim=0, out=c)
        c.mul_(m.columns).rsqrt_().mul_(min(m.rows, m.columns) ** 0.5).nan_to_num_(posinf=0.0)
        for row, rows in places:
            rows.copy_(v[row : row + len(rows)])
        if layout.side is None:
            return
        if not layout.copies:
            for rank, _ in layout.matrices[i].holders:
                if rank != layout.rank:
                    layout.side.owned[i, rank][-1].copy_(c)
            return
        sent = layout.side.owned[i, layout.rank]
        sent[-1].copy_(c)
        for run in layout.local_runs:
            if run.number == i:
                sent[run.side : run.side + len(run.rows)].copy_(run.rows)

    def scaled(self, runs: Sequence[LocalRun]) -> list[torch.Tensor]:
        """The updates of runs, fp32. Writes the moments that came back from owners."""
        layout = self._layout
        updates = layout.buffers("rescaled", runs, torch.float32)
        for update, run in zip(updates, runs, strict=True):
            rows, c = run.rows, self._factors[run.number]
            if not run.own:
                assert layout.side is not None
                received = layout.side.parts[run.number]
                rows.copy_(received[run.side : run.side + rows.numel()])
                c = received[-1]
            factor = layout.scratch.take("rows t", (rows.numel(),), torch.float32)
            torch.sqrt(rows, out=factor).add_(EPS)
            torch.div(c, factor, out=factor)
            update.copy_(run.packed)
            update.view(rows.numel(), -1).mul_(factor.unsqueeze(-1))
        return updates

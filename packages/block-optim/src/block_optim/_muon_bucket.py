"""One bucket of Muon's plan on one rank: pack, compute, send back, apply. All memory is laid out once.

gradient, momentum          lerp, cast to bf16               Newton-Schulz           add to the parameter
fragments here  ----------> wire: the owner's stack if   --> stacks of equal     --> fragments here, from
                            this rank owns the matrix,       shapes, in place        the same wire views
                            else the exchange's `held`
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from block_optim._exchange import Exchange, Lane, moves
from block_optim._muon_momentum import decode
from block_optim._muon_plan import PlannedMatrix
from block_optim._muon_tensors import LocalParam
from block_optim._newton_schulz import Recipe, Scratch, orthogonalize_
from block_optim._torch_compat import foreach_add_, foreach_copy_, foreach_lerp_, foreach_mul_

WIRE = torch.bfloat16
EXCHANGE_SLOTS = 3  # exchanges under way or unread at once: of the next bucket, this one, the last
STACK_SLOTS = 2  # buckets whose own matrices are in memory at once


@dataclass
class Fragment:
    """A run of a matrix that this rank holds.

    Attributes:
        number: the matrix's in the bucket.
        param: the parameter.
        low, high: in the parameter's local elements.
        wire: where it is packed and where its update arrives, 1-D, bf16.
        own: whether this rank computes the matrix.
        row: the run's first row in the matrix (NorMuon).
        side: first row in this rank's part of the side exchange (NorMuon).
    """

    number: int
    param: LocalParam
    low: int
    high: int
    wire: torch.Tensor
    own: bool
    row: int
    side: int


class Bucket:
    """Matrices of one param group that travel together.

    Args:
        matrices: of the plan, in its order.
        params: this rank's parameters by index.
        group: the param group, whose options are read in every step.
        recipe: what Newton-Schulz does.
        place: process group (None: nothing travels), this rank in it, number of this bucket.
        scratch: all memory.
        lane: where transfers run.
    """

    def __init__(
        self,
        matrices: list[PlannedMatrix],
        params: Mapping[int, LocalParam],
        group: dict[str, Any],
        recipe: Recipe,
        place: tuple[Any, int, int],
        scratch: Scratch,
        lane: Lane,
    ) -> None:
        self.matrices, self.group, self.recipe = matrices, group, recipe
        self.lr: Any = 0.0  # of this step: a number, or a tensor on the CPU
        self._params, self._scratch, self._lane = params, scratch, lane
        process_group, self._rank, number = place
        self._normuon = bool(group["normuon"])
        self.exchange: Exchange | None = None
        self.side: Exchange | None = None
        owners, lengths = [m.owner for m in matrices], [m.held for m in matrices]
        # Only of these do all ranks know alike whether they have gradients, and so whether there is a transfer.
        self._travelling = frozenset(m.param for m in matrices if m.moved)
        if process_group is not None and moves(owners, lengths):
            slot = str(number % EXCHANGE_SLOTS)
            at = (process_group, self._rank, owners)
            self.exchange = Exchange(*at, lengths, WIRE, scratch, slot)
            if self._normuon:
                self.side = Exchange(*at, side_lengths(matrices), torch.float32, scratch, f"side {slot}")
        self._lay_out_stacks(number)
        self._lay_out_fragments()
        self.fell_back = 0

    # ------------------------------------------------------------- memory, once

    def _lay_out_stacks(self, number: int) -> None:
        """A contiguous stack for each shape of this rank's own matrices."""
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, m in enumerate(self.matrices):
            if m.owner == self._rank:
                by_shape[m.matrix.rows, m.matrix.columns].append(i)
        total = sum(rows * columns * len(own) for (rows, columns), own in by_shape.items())
        arena = self._scratch.take(f"stacks {number % STACK_SLOTS}", (total,), WIRE)
        self._stacks: list[tuple[torch.Tensor, list[int]]] = []
        self._own: dict[int, torch.Tensor] = {}
        start = 0
        for (rows, columns), own in by_shape.items():
            stop = start + rows * columns * len(own)
            stack = arena[start:stop].view(len(own), rows, columns)
            self._stacks.append((stack, own))
            self._own.update({i: stack[k].view(-1) for k, i in enumerate(own)})
            start = stop
        self._row_scale = self._scratch.take(
            f"row scale {number % STACK_SLOTS}", (len(self.matrices),), torch.float32
        )

    def _lay_out_fragments(self) -> None:
        self._fragments: list[Fragment] = []
        self._arrived: list[
            tuple[int, torch.Tensor, torch.Tensor]
        ] = []  # matrix, part of the stack, part of `owned`
        self._arrived_rows: list[
            tuple[int, int, int, torch.Tensor]
        ] = []  # matrix, first row, rows, part of side's
        for i, m in enumerate(self.matrices):
            param = self._params[m.param]
            columns = m.matrix.columns
            for rank, _ in m.held:
                pieces = m.matrix.pieces(*param.held.cuts[rank : rank + 2])
                if rank == self._rank:
                    self._add_fragments(i, param, pieces, columns)
                elif m.owner == self._rank:
                    assert self.exchange is not None
                    at = 0
                    for first, _, length in pieces:
                        part = self.exchange.owned[i, rank][at : at + length]
                        self._arrived.append((i, self._own[i][first : first + length], part))
                        if self.side is not None:
                            rows = self.side.owned[i, rank][at // columns : (at + length) // columns]
                            self._arrived_rows.append((i, first // columns, length // columns, rows))
                        at += length
        params = {id(f.param): f.param for f in self._fragments}
        self.local_params = list(params.values())

    def _add_fragments(self, i: int, param: LocalParam, pieces: Any, columns: int) -> None:
        own = self.matrices[i].owner == self._rank
        at = 0
        for first, low, length in pieces:
            if own:
                wire = self._own[i][first : first + length]
            else:
                assert self.exchange is not None
                wire = self.exchange.held[i][at : at + length]
            self._fragments.append(
                Fragment(i, param, low, low + length, wire, own, first // columns, at // columns)
            )
            at += length

    # ------------------------------------------------------------- a step

    def send(self, active: frozenset[int]) -> Callable[[], None]:
        """Pack what this rank holds, start the transfer to the owners; the result waits for what is owned here.

        Communicates: one all_to_all_single (with NorMuon a second, small one), unless nothing travels.
        """
        self._active = active
        by_kind: dict[Any, list[Fragment]] = defaultdict(list)
        for f in self._fragments:
            if f.param.index in active:
                by_kind[f.param.coded, f.param.momentum.dtype].append(f)
        for some in by_kind.values():
            self._pack(some)
        if not self._travelling & active:
            return _nothing
        waits = []
        if self.side is not None:
            for f in self._fragments:
                if not f.own:
                    rows = (f.high - f.low) // f.param.columns
                    self.side.held[f.number][f.side : f.side + rows].copy_(f.param.rows(f.low, f.high))
            waits.append(self.side.to_owners(self._lane))
        if self.exchange is not None:
            waits.append(self.exchange.to_owners(self._lane))
        return lambda: _all(waits)

    def _pack(self, fragments: list[Fragment]) -> None:
        """Momentum, or with Nesterov the gradient on its way to it, rounded to bf16; of fragments of one dtype."""
        mu, nesterov = self.group["momentum"], self.group["nesterov"]
        wires = [f.wire for f in fragments]
        if not fragments[0].param.coded:
            momenta = [f.param.momentum[f.low : f.high] for f in fragments]
            if not nesterov:
                foreach_copy_(wires, momenta)
                return
            values = self._pieces("pack", fragments, fragments[0].param.momentum.dtype)
            foreach_copy_(values, [f.param.grad[f.low : f.high] for f in fragments])
            foreach_lerp_(values, momenta, mu)
            foreach_copy_(wires, values)
            return
        for f in fragments:
            value = self._scratch.take("pack", (f.high - f.low,), torch.float32)
            momentum = self._scratch.take("decoded", (f.high - f.low,), torch.float32)
            decode(*f.param.momentum_part(f.low, f.high), f.param.columns, momentum)
            if nesterov:
                momentum = value.copy_(f.param.grad[f.low : f.high]).lerp_(momentum, mu)
            f.wire.copy_(momentum)

    def _pieces(self, name: str, fragments: list[Fragment], dtype: torch.dtype) -> list[torch.Tensor]:
        """Scratch for each fragment, side by side."""
        lengths = [f.high - f.low for f in fragments]
        flat = self._scratch.take(name, (sum(lengths),), dtype)
        return list(flat.split(lengths))

    def compute(self) -> None:
        """Orthogonalise this rank's own matrices. Communicates nothing."""
        arrived = [a for a in self._arrived if self._is_active(a[0])]
        if arrived:
            foreach_copy_([a[1] for a in arrived], [a[2] for a in arrived])
        for stack, own in self._stacks:
            active = [self._is_active(i) for i in own]
            if all(active):
                self.fell_back += orthogonalize_(stack, self.recipe, self._scratch)
            else:
                for k, here in enumerate(active):
                    if here:
                        self.fell_back += orthogonalize_(stack[k : k + 1], self.recipe, self._scratch)
        if self._normuon:
            for i in self._own:
                if self._is_active(i):
                    self._normalise_rows(i)
        if arrived:
            foreach_copy_([a[2] for a in arrived], [a[1] for a in arrived])

    def _is_active(self, number: int) -> bool:
        return self.matrices[number].param in self._active

    def _normalise_rows(self, i: int) -> None:
        """NorMuon at the owner: second moments of the rows, and the factor that gives the update its norm back.

        v <- beta2 v + (1 - beta2) mean(O^2) of a row; the update is c O / (sqrt(v) + eps), c such that its
        Frobenius norm is that of an orthogonal matrix, sqrt(min(rows, columns)). Li et al., arXiv 2510.05491.
        """
        m = self.matrices[i].matrix
        beta, eps = self.group["normuon_beta2"], self.group["normuon_eps"]
        v = self._scratch.take("rows v", (m.rows,), torch.float32)
        s = self._scratch.take("rows s", (m.rows,), torch.float32)
        t = self._scratch.take("rows t", (m.rows,), torch.float32)
        mine = [f for f in self._fragments if f.number == i]
        for f in mine:
            rows = f.param.rows(f.low, f.high)
            v[f.row : f.row + rows.numel()].copy_(rows)
        for number, first, rows_count, part in self._arrived_rows:
            if number == i:
                v[first : first + rows_count].copy_(part)
        matrix = self._own[i].view(m.rows, m.columns)
        torch.linalg.vector_norm(matrix, dim=-1, dtype=torch.float32, out=s)
        s.square_().div_(m.columns)
        v.lerp_(s, 1 - beta)
        torch.sqrt(v, out=t).add_(eps).square_()
        c = self._row_scale[i]
        torch.sum(s.div_(t), dim=0, out=c)
        c.mul_(m.columns).rsqrt_().mul_(min(m.rows, m.columns) ** 0.5).nan_to_num_(posinf=0.0)
        for f in mine:
            rows = f.param.rows(f.low, f.high)
            rows.copy_(v[f.row : f.row + rows.numel()])
        if self.side is not None:
            for number, first, rows_count, part in self._arrived_rows:
                if number == i:
                    part.copy_(v[first : first + rows_count])
            for rank, _ in self.matrices[i].held:
                if rank != self._rank:
                    self.side.owned[i, rank][-1].copy_(c)

    def send_back(self) -> Callable[[], None]:
        """Start the transfer of the updates to where the matrices are held; the result waits. As `send`, backwards."""
        if not self._travelling & self._active:
            return _nothing
        sides = [e for e in (self.side, self.exchange) if e is not None]
        waits = [e.back(self._lane) for e in sides]
        return lambda: _all(waits)

    def apply(self, own: bool) -> None:
        """Decay weights and add the updates: of this rank's own matrices, or of the others'. Communicates nothing."""
        fragments = [f for f in self._fragments if f.own == own and f.param.index in self._active]
        if not fragments:
            return
        lr, decay = self.lr, self.group["weight_decay"]
        by_scale: dict[tuple[float, bool], list[Fragment]] = defaultdict(list)
        for f in fragments:
            m = self.matrices[f.number].matrix
            alpha = float(-lr * lr_ratio(self.group["adjust_lr_fn"], m.rows, m.columns))
            by_scale[alpha, f.param.local.dtype.itemsize < 4].append(f)
        if self.group["cautious_weight_decay"]:
            self._decay_cautiously(fragments, float(lr * decay))
        else:
            foreach_mul_([f.param.local[f.low : f.high] for f in fragments], float(1 - lr * decay))
        for (alpha, narrow), some in by_scale.items():
            updates = self._rescaled(some) if self._normuon else [f.wire for f in some]
            targets = [f.param.local[f.low : f.high] for f in some]
            if not narrow:
                foreach_add_(targets, updates, alpha=alpha)
            else:  # low-precision parameters are added to in fp32 and rounded once, whatever their cuts
                wide = self._pieces("apply", some, torch.float32)
                foreach_copy_(wide, targets)
                foreach_add_(wide, updates, alpha=alpha)
                foreach_copy_(targets, wide)

    def _decay_cautiously(self, fragments: list[Fragment], amount: float) -> None:
        """Decay only where the update shrinks the weight anyway (Chen et al., Cautious Weight Decay)."""
        factors = self._pieces("decay", fragments, torch.float32)
        targets = [f.param.local[f.low : f.high] for f in fragments]
        for factor, f, target in zip(factors, fragments, targets, strict=True):
            factor.copy_(f.wire)
            torch.mul(factor, target, out=factor)
            torch.ge(factor, 0, out=factor)
            factor.mul_(-amount).add_(1)
            target.mul_(factor)

    def _rescaled(self, fragments: list[Fragment]) -> list[torch.Tensor]:
        """NorMuon's updates: each row divided by its second moment's root, times the matrix's factor."""
        updates = self._pieces("rescaled", fragments, torch.float32)
        for update, f in zip(updates, fragments, strict=True):
            rows = f.param.rows(f.low, f.high)
            c = self._row_scale[f.number]
            if not f.own:
                assert self.side is not None
                held = self.side.held[f.number]
                rows.copy_(held[f.side : f.side + rows.numel()])
                c = held[-1]
            factor = self._scratch.take("rows t", (rows.numel(),), torch.float32)
            torch.sqrt(rows, out=factor).add_(self.group["normuon_eps"])
            torch.div(c, factor, out=factor)
            update.copy_(f.wire)
            update.view(rows.numel(), -1).mul_(factor.unsqueeze(-1))
        return updates


def side_lengths(matrices: list[PlannedMatrix]) -> list[list[tuple[int, int]]]:
    """What NorMuon sends beside a matrix: a number for each row, and one for the matrix."""
    return [[(rank, count // m.matrix.columns + 1) for rank, count in m.held] for m in matrices]


def lr_ratio(adjust: str | None, rows: int, columns: int) -> float:
    """By what the learning rate of a matrix is multiplied."""
    if adjust is None or adjust == "original":
        return float(max(1.0, rows / columns) ** 0.5)
    if adjust == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)
    if adjust == "spectral":
        return float((rows / columns) ** 0.5)
    assert adjust == "none"
    return 1.0


def run_pipeline(buckets: list[Bucket], active: frozenset[int]) -> None:
    """A step: the next bucket's transfer and the last one's return run beside this one's Newton-Schulz."""
    if not buckets:
        return
    arrive, returned, last = buckets[0].send(active), _nothing, None
    for i, bucket in enumerate(buckets):
        following = buckets[i + 1].send(active) if i + 1 < len(buckets) else _nothing
        arrive()
        bucket.compute()
        leave = bucket.send_back()
        bucket.apply(own=True)
        returned()
        if last is not None:
            last.apply(own=False)
        arrive, returned, last = following, leave, bucket
    returned()
    buckets[-1].apply(own=False)


def _all(waits: list[Callable[[], None]]) -> None:
    for wait in waits:
        wait()


def _nothing() -> None:
    return None

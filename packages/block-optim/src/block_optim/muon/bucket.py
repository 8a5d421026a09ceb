"""One bucket of Muon's matrices on one rank: pack, compute, send back, apply. All memory is laid out once.

gradient, momentum          lerp, cast to bf16               Newton-Schulz           add to the parameter
fragments here  ----------> packed: the owner's stack if --> stacks of equal     --> fragments here, from
                            this rank owns the matrix,       shapes, in place        the same packed views
                            else the exchange's `held`
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch

from block_optim.core import device as devices
from block_optim.core._torch_compat import foreach_add_, foreach_copy_, foreach_lerp_, foreach_mul_
from block_optim.core.exchange import Exchange, Lane, Wait, nothing, travels
from block_optim.core.holding import Holding
from block_optim.core.params import Group
from block_optim.core.precision import Writer, is_narrow
from block_optim.core.scratch import Scratch
from block_optim.core.skip import portions, unless
from block_optim.muon.assignment import AssignedMatrix
from block_optim.muon.local import LocalParam
from block_optim.muon.newton_schulz import Recipe, orthogonalize_

_LOG = logging.getLogger("block_optim")

PACKED = torch.bfloat16
EXCHANGE_SLOTS = 3  # exchanges under way or unread at once: of the next bucket, this one, the last
STACK_SLOTS = 2  # buckets whose own matrices are in memory at once

LearningRate = float | torch.Tensor  # a tensor is on the CPU


@dataclass
class Fragment:
    """A run of a matrix that this rank holds.

    Attributes:
        number: the matrix's in the bucket.
        param: the parameter.
        low, high: in the parameter's local elements.
        packed: where it is packed and where its update arrives, bf16: a run is 1-D, runs at equal distances are 2-D.
        own: whether this rank computes the matrix.
        row: the run's first row in the matrix (NorMuon).
        side: first row in what this rank sends in the side exchange (NorMuon).
    """

    number: int
    param: LocalParam
    low: int
    high: int
    packed: torch.Tensor
    own: bool
    row: int
    side: int

    @property
    def local(self) -> torch.Tensor:
        """Its elements of the parameter."""
        return self._shaped(self.param.local[self.low : self.high])

    @property
    def grad(self) -> torch.Tensor:
        """Its elements of the gradient."""
        return self._shaped(self.param.grad[self.low : self.high])

    @property
    def momentum(self) -> torch.Tensor:
        """Its elements of the momentum's buffer."""
        return self._shaped(self.param.momentum[self.low : self.high])

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if self.packed.dim() == 1 else flat.view(self.packed.shape)

    @property
    def rows(self) -> torch.Tensor:
        """NorMuon's second moments of its rows."""
        return self.param.rows(self.low, self.high)


@dataclass
class Arrival:
    """A run of one of this rank's own matrices that another rank holds.

    Attributes:
        number: the matrix's in the bucket.
        stack: its place in the matrix.
        packed: where it arrives, and where its update is sent from.
        row: its first row in the matrix, and
        rows: the second moments of its rows in the side exchange (NorMuon).
    """

    number: int
    stack: torch.Tensor
    packed: torch.Tensor
    row: int
    rows: torch.Tensor | None


class Bucket:
    """Matrices of one parameter group that travel together.

    Args:
        matrices: of the assignment, in its order.
        params: this rank's parameters by index.
        group: the parameter group, whose options are read in every step.
        recipe: what Newton-Schulz does.
        holding: of one of the parameters: the process group (None: nothing travels) and this rank in it.
        number: of this bucket; it says which buffers it shares with others.
        scratch: all memory.
        lane: where transfers run.
    """

    def __init__(
        self,
        matrices: list[AssignedMatrix],
        params: Sequence[LocalParam],
        group: Group,
        recipe: Recipe,
        holding: Holding,
        *,
        number: int,
        scratch: Scratch,
        lane: Lane,
    ) -> None:
        self.matrices, self.group, self.recipe, self.number = matrices, group, recipe, number
        self._fell_back = 0
        self._skip: torch.Tensor | None = None
        self._checks: list[
            tuple[devices.OnItsWay, list[int]]
        ] = []  # of the last step, on their way from the device
        self._distrusted: set[int] = set()
        self._params, self._scratch, self._lane, self._write = params, scratch, lane, Writer()
        self._rank = holding.rank
        self._normuon = bool(group["normuon"])
        self.exchange: Exchange | None = None
        self.side: Exchange | None = None
        owners, lengths = [m.owner for m in matrices], [m.held for m in matrices]
        # Only of these do all ranks know alike whether they have gradients, and so whether there is a transfer.
        self._travelling = frozenset(m.param for m in matrices if m.moved)
        if holding.group is not None and travels(owners, lengths):
            slot = str(number % EXCHANGE_SLOTS)
            at = (holding.group, holding.rank, owners)
            self.exchange = Exchange(*at, lengths, PACKED, scratch, slot)
            if self._normuon:
                self.side = Exchange(*at, side_lengths(matrices), torch.float32, scratch, f"side {slot}")
        self._exchanges = [e for e in (self.side, self.exchange) if e is not None]
        self._lay_out_stacks(number)
        self._fragments: list[Fragment] = []
        self._arrivals: list[Arrival] = []
        for i in range(len(matrices)):
            self._lay_out(i)

    # ------------------------------------------------------------- memory, once

    def _lay_out_stacks(self, number: int) -> None:
        """A contiguous stack for each shape of this rank's own matrices."""
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, m in enumerate(self.matrices):
            if m.owner == self._rank:
                by_shape[m.matrix.rows, m.matrix.columns].append(i)
        total = sum(rows * columns * len(own) for (rows, columns), own in by_shape.items())
        arena = self._scratch.take(f"stacks {number % STACK_SLOTS}", (total,), PACKED)
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

    def _lay_out(self, i: int) -> None:
        """What this rank holds of a matrix, and what it gets of its own ones."""
        m, param = self.matrices[i], self._params[self.matrices[i].param]
        columns, exchange = m.matrix.columns, self.exchange
        for rank, _ in m.held:
            if self._rank not in (rank, m.owner):
                continue
            at = 0  # in what travels of this matrix
            for piece in m.matrix.pieces(param.holding, rank):
                row, side, stop = piece.first // columns, at // columns, at + piece.numel
                if rank == self._rank == m.owner:
                    packed = piece.of(self._own[i])
                else:
                    assert exchange is not None
                    flat = exchange.held[i] if rank == self._rank else exchange.owned[i, rank]
                    packed = flat[at:stop].view(piece.shape)
                if rank == self._rank:
                    low, own = piece.local, m.owner == rank
                    self._fragments.append(Fragment(i, param, low, low + piece.numel, packed, own, row, side))
                else:
                    rows = None
                    if self.side is not None:
                        rows = self.side.owned[i, rank][side : stop // columns]
                    self._arrivals.append(Arrival(i, piece.of(self._own[i]), packed, row, rows))
                at = stop

    # ------------------------------------------------------------- a step

    def send(self, active: frozenset[int], found_inf: torch.Tensor | None = None) -> Wait:
        """Pack what this rank holds, start the transfer to the owners; the result waits for what is owned here.

        Communicates: one all_to_all_single (with NorMuon a second, small one), unless nothing travels.
        """
        self._active, self._skip = active, found_inf
        by_kind: dict[tuple[bool, torch.dtype], list[Fragment]] = defaultdict(list)
        for f in self._fragments:
            if f.param.index in active:
                by_kind[f.param.cast, f.param.momentum.dtype].append(f)
        for some in by_kind.values():
            self._pack(some)
        if not self._travelling & active:
            return nothing
        if self.side is not None:
            for f in self._fragments:
                if not f.own:
                    self.side.held[f.number][f.side : f.side + len(f.rows)].copy_(f.rows)
        waits = [e.to_owners(self._lane) for e in self._exchanges]
        return lambda: [wait() for wait in waits]

    def _pack(self, fragments: list[Fragment]) -> None:
        """Momentum, or with Nesterov the gradient on its way to it, rounded to bf16; of fragments of one dtype."""
        mu, nesterov = self.group["momentum"], self.group["nesterov"]
        packed = [f.packed for f in fragments]
        if not fragments[0].param.cast:
            momenta = [f.momentum for f in fragments]
            if not nesterov:
                foreach_copy_(packed, momenta)
                return
            values = self._pieces("pack", fragments, fragments[0].param.momentum.dtype)
            foreach_copy_(values, [f.grad for f in fragments])
            foreach_lerp_(values, momenta, mu)
            foreach_copy_(packed, values)
            return
        for f in fragments:
            value = self._scratch.take("pack", (f.high - f.low,), torch.float32)
            momentum = self._scratch.take("cast", (f.high - f.low,), torch.float32)
            momentum.copy_(f.param.momentum[f.low : f.high])
            if nesterov:
                momentum = value.copy_(f.param.grad[f.low : f.high]).lerp_(momentum, mu)
            f.packed.copy_(momentum.view(f.packed.shape))

    def _pieces(self, name: str, fragments: Sequence[Fragment], dtype: torch.dtype) -> list[torch.Tensor]:
        """Scratch for each fragment, side by side."""
        flat = self._scratch.take_each(name, [f.high - f.low for f in fragments], dtype)
        return [
            t if f.packed.dim() == 1 else t.view(f.packed.shape) for t, f in zip(flat, fragments, strict=True)
        ]

    def compute(self) -> None:
        """Orthogonalise this rank's own matrices. Communicates nothing."""
        self._read_checks()
        arrived = [a for a in self._arrivals if self._is_active(a.number)]
        if arrived:
            foreach_copy_([a.stack for a in arrived], [a.packed for a in arrived])
        for stack, own in self._stacks:
            active = [self._is_active(i) for i in own]
            if all(active) and not self._distrusted.intersection(own):
                self._orthogonalize(stack, own, self.recipe)
                continue
            for k, i in enumerate(own):
                if active[k]:
                    recipe = replace(self.recipe, method="standard") if i in self._distrusted else self.recipe
                    self._orthogonalize(stack[k : k + 1], [i], recipe)
        if self._normuon:
            for i in self._own:
                if self._is_active(i):
                    self._normalise_rows(i)
        if arrived:
            foreach_copy_([a.packed for a in arrived], [a.stack for a in arrived])

    def _orthogonalize(self, stack: torch.Tensor, own: list[int], recipe: Recipe) -> None:
        found = orthogonalize_(stack, recipe, self._scratch)
        if isinstance(found, int):
            self._fell_back += found
        else:  # not of a step that is skipped
            failed = found if self._skip is None else found & (self._skip == 0)
            self._checks.append((devices.host_copy(failed), own))

    def _read_checks(self) -> None:
        """Do without the Gram form for matrices of which the last step's result failed its check on the device."""
        for failed, own in self._checks:
            for i in compress(own, failed.read().tolist()):
                m = self.matrices[i]
                _LOG.warning("Gram Newton-Schulz of %s failed its check; from now on it is standard", m.name)
                self._distrusted.add(i)
                self._fell_back += 1
        self._checks.clear()

    @property
    def fell_back(self) -> int:
        """Matrices orthogonalised by a safer method. Waits for the device."""
        self._read_checks()
        return self._fell_back

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
        # Where rows lie: here, and (as they arrived) on other ranks.
        places = [(f.row, f.rows) for f in self._fragments if f.number == i]
        places += [(a.row, a.rows) for a in self._arrivals if a.number == i and a.rows is not None]
        for row, rows in places:
            v[row : row + len(rows)].copy_(rows)
        matrix = self._own[i].view(m.rows, m.columns)
        torch.linalg.vector_norm(matrix, dim=-1, dtype=torch.float32, out=s)
        s.square_().div_(m.columns)
        v.lerp_(s, 1 - beta)
        torch.sqrt(v, out=t).add_(eps).square_()
        c = self._row_scale[i]
        torch.sum(s.div_(t), dim=0, out=c)
        c.mul_(m.columns).rsqrt_().mul_(min(m.rows, m.columns) ** 0.5).nan_to_num_(posinf=0.0)
        with unless(self._skip, [rows for _, rows in places]):
            for row, rows in places:
                rows.copy_(v[row : row + len(rows)])
        if self.side is not None:
            for rank, _ in self.matrices[i].held:
                if rank != self._rank:
                    self.side.owned[i, rank][-1].copy_(c)

    def send_back(self) -> Wait:
        """Start the transfer of the updates to where the matrices are held; the result waits. As `send`, backwards."""
        if not self._travelling & self._active:
            return nothing
        waits = [e.back(self._lane) for e in self._exchanges]
        return lambda: [wait() for wait in waits]

    def apply(self, own: bool, lr: LearningRate) -> None:
        """Decay weights and add the updates: of this rank's own matrices, or of the others'. Communicates nothing."""
        fragments = [f for f in self._fragments if f.own == own and f.param.index in self._active]
        if not fragments:
            return
        decay = lr * self.group["weight_decay"]
        by_scale: dict[tuple[float, bool], list[Fragment]] = defaultdict(list)
        for f in fragments:
            m = self.matrices[f.number].matrix
            alpha = float(-lr * lr_ratio(self.group["adjust_lr_fn"], m.rows, m.columns))
            by_scale[alpha, is_narrow(f.local.dtype)].append(f)
        for (alpha, narrow), some in by_scale.items():
            for portion in portions(self._skip, some, lambda f: f.local.nbytes):
                written = [f.local for f in portion] + [f.rows for f in portion if self._normuon and not own]
                with unless(self._skip, written):
                    self._apply(portion, alpha, decay, narrow)

    def _apply(self, some: Sequence[Fragment], alpha: float, decay: LearningRate, narrow: bool) -> None:
        weights = [f.local for f in some]
        if narrow:  # decayed and added to in fp32, and rounded once, whatever their cuts
            weights = self._pieces("apply", some, torch.float32)
            foreach_copy_(weights, [f.local for f in some])
        if self.group["cautious_weight_decay"]:
            self._decay_cautiously(some, weights, float(decay))
        else:
            foreach_mul_(weights, float(1 - decay))
        updates = self._rescaled(some) if self._normuon else [f.packed for f in some]
        if updates[0].dtype != weights[0].dtype:  # on CUDA, mixed dtypes would be a kernel a tensor
            copies = self._pieces("rescaled", some, weights[0].dtype)
            foreach_copy_(copies, updates)
            updates = copies
        foreach_add_(weights, updates, alpha=alpha)
        if narrow:
            for f, wide in zip(some, weights, strict=True):
                step = 0 if f.param.steps is None else int(f.param.steps)
                self._write(f.param.param, wide, f.local, f.low, step)

    def _decay_cautiously(
        self, fragments: Sequence[Fragment], weights: list[torch.Tensor], amount: float
    ) -> None:
        """Decay only where the update shrinks the weight anyway (Chen et al., Cautious Weight Decay)."""
        factors = self._pieces("decay", fragments, torch.float32)
        for factor, f, weight in zip(factors, fragments, weights, strict=True):
            factor.copy_(f.packed)
            torch.mul(factor, weight, out=factor)
            torch.ge(factor, 0, out=factor)
            factor.mul_(-amount).add_(1)
            weight.mul_(factor)

    def _rescaled(self, fragments: Sequence[Fragment]) -> list[torch.Tensor]:
        """NorMuon's updates: each row divided by its second moment's root, times the matrix's factor."""
        updates = self._pieces("rescaled", fragments, torch.float32)
        for update, f in zip(updates, fragments, strict=True):
            rows, c = f.rows, self._row_scale[f.number]
            if not f.own:
                assert self.side is not None
                held = self.side.held[f.number]
                rows.copy_(held[f.side : f.side + rows.numel()])
                c = held[-1]
            factor = self._scratch.take("rows t", (rows.numel(),), torch.float32)
            torch.sqrt(rows, out=factor).add_(self.group["normuon_eps"])
            torch.div(c, factor, out=factor)
            update.copy_(f.packed)
            update.view(rows.numel(), -1).mul_(factor.unsqueeze(-1))
        return updates


def side_lengths(matrices: list[AssignedMatrix]) -> list[list[tuple[int, int]]]:
    """What NorMuon sends in addition to a matrix: a number for each row, and one for the matrix."""
    return [[(rank, count // m.matrix.columns + 1) for rank, count in m.held] for m in matrices]


def lr_ratio(adjust: str | None, rows: int, columns: int) -> float:
    """By what the learning rate of a matrix is multiplied."""
    if adjust is None or adjust == "original":
        return float(max(1.0, rows / columns) ** 0.5)
    if adjust == "match_rms_adamw":
        return float(0.2 * max(rows, columns) ** 0.5)
    if adjust in ("spectral", "spectral_unclamped"):
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
        found_inf: as in `Active`.
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

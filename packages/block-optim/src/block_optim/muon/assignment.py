"""Assigns each of the model's matrices to a rank and a bucket. Frozen; printable.

A rank's matrices, equal shapes side by side, are cut into runs of about ``bucket_bytes``; bucket k is the
k-th run of every rank. So a bucket gives each rank about the same work, and equal shapes are computed as one batch.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from block_optim.core.assign import Job, assign, digest, loads, lower_bound
from block_optim.core.scratch import packed
from block_optim.muon.matrices import Matrix

SENT_BYTES = 2  # elements travel as bf16: Newton-Schulz rounds its input to it, and returns it


@dataclass(frozen=True)
class AssignedMatrix:
    """One matrix, the ranks that hold it, its owner and its bucket.

    Attributes:
        name: the parameter's, with the matrix's number where it has several.
        param: index of the parameter in the optimizer.
        group: index of its param group.
        matrix: its place in the parameter.
        holders: (rank, elements) of each rank that holds some of it, in the order of ranks; () where each holds all.
        flops: cost of its orthogonalisation.
        copies: how many ranks hold all of it, where these divide the work; else 0.
        owner: the rank that computes it.
        bucket: number of its bucket.
    """

    name: str
    param: int
    group: int
    matrix: Matrix
    holders: tuple[tuple[int, int], ...]
    flops: int
    copies: int = 0
    owner: int = 0
    bucket: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix in an exchange."""
        return self.matrix.numel * SENT_BYTES

    @property
    def moved(self) -> int:
        """Elements that are not at the owner: they travel there, and as many back."""
        return sum(count for rank, count in self.holders if rank != self.owner)

    @property
    def bytes_sent(self) -> int:
        """Bytes that all ranks together send for it in a step. Of copies, only updates travel, to each other rank."""
        return SENT_BYTES * (2 * self.moved + max(self.copies - 1, 0) * self.matrix.numel)

    @property
    def owner_share(self) -> float:
        """The share of it that its owner holds."""
        return 1.0 if self.copies else dict(self.holders).get(self.owner, 0) / self.matrix.numel


@dataclass(frozen=True)
class DomainAssignment:
    """The matrices that one process group exchanges; matrices that are not exchanged are a group of one rank."""

    num_ranks: int
    matrices: tuple[AssignedMatrix, ...]
    num_buckets: int

    @property
    def loads(self) -> tuple[int, ...]:
        """FLOPs of each rank in a step."""
        return tuple(loads(self._jobs(), [m.owner for m in self.matrices], self.num_ranks))

    @property
    def imbalance(self) -> float:
        """The largest load over the mean: 1 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * self.num_ranks / total if total else 1.0

    @property
    def bound(self) -> int:
        """Lower bound on the largest load of any assignment, in FLOPs."""
        return lower_bound(self._jobs(), self.num_ranks)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all ranks together send in a step, to the owners and back."""
        return sum(m.bytes_sent for m in self.matrices)

    @property
    def fingerprint(self) -> int:
        """Equal on ranks whose assignments are equal."""
        return digest(self.num_ranks, self.num_buckets, self.matrices)

    def _jobs(self) -> list[Job]:
        return [Job(m.flops, m.nbytes, m.holders) for m in self.matrices]

    def describe(self, most: int = 40) -> str:
        """A table of ranks and one of matrices, of at most this many lines each."""
        lines = [
            f"{len(self.matrices)} matrices, {self.num_ranks} rank{'s' * (self.num_ranks != 1)}, {self.num_buckets} "
            f"bucket{'s' * (self.num_buckets != 1)}: {_si(sum(self.loads))}FLOP a step, imbalance "
            f"{self.imbalance:.3f}, {_si(self.bytes_moved)}B moved a step"
        ]
        lines.append(f"  {'rank':>6}{'matrices':>10}{'FLOP':>10}{'owned B':>10}{'received B':>12}")
        for rank, load in enumerate(self.loads[:most]):
            own = [m for m in self.matrices if m.owner == rank]
            owned, received = sum(m.nbytes for m in own), SENT_BYTES * sum(m.moved for m in own)
            received += sum(m.nbytes for m in self.matrices if m.copies and m.owner != rank)
            lines.append(f"  {rank:>6}{len(own):>10}{_si(load):>10}{_si(owned):>10}{_si(received):>12}")
        lines += _more(self.num_ranks - most, "ranks")
        width = max((len(m.name) for m in self.matrices[:most]), default=4)
        lines.append(
            f"  {'matrix':{width}}  {'shape':>13}{'bucket':>8}{'owner':>7}{'holds':>7}{'FLOP':>10}{'moved B':>10}"
        )
        for m in self.matrices[:most]:
            shape = f"{m.matrix.rows}x{m.matrix.columns}"
            lines.append(
                f"  {m.name:{width}}  {shape:>13}{m.bucket:>8}{m.owner:>7}{m.owner_share:>7.0%}{_si(m.flops):>10}"
                f"{_si(m.bytes_sent):>10}"
            )
        return "\n".join(lines + _more(len(self.matrices) - most, "matrices"))


@dataclass(frozen=True)
class Assignment:
    """The owner of each matrix, one `DomainAssignment` for each process group. ``print`` it."""

    domains: tuple[DomainAssignment, ...]

    def __str__(self) -> str:
        return "\n".join(["Muon assignment", *(domain.describe() for domain in self.domains)])


def assign_domain(matrices: Sequence[AssignedMatrix], num_ranks: int, bucket_bytes: int) -> DomainAssignment:
    """Owners and buckets for matrices that have neither. Pure; the same on every rank.

    Buckets do not mix param groups, since a batch has its group's options. Of copies every rank receives
    the whole bucket, which then is ``bucket_bytes`` over all owners.
    """
    if matrices and matrices[0].copies:
        bucket_bytes //= num_ranks
    owners = assign([Job(m.flops, m.nbytes, m.holders) for m in matrices], num_ranks)
    buckets = [0] * len(matrices)
    own: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, m in enumerate(matrices):
        own[m.group][owners[i]].append(i)
    first = 0
    for group in sorted(own):
        used = first
        for queue in own[group].values():
            queue.sort(
                key=lambda i: (-matrices[i].flops, matrices[i].matrix.rows, matrices[i].matrix.columns, i)
            )
            runs = packed(queue, lambda i: matrices[i].nbytes, bucket_bytes)
            for bucket, run in enumerate(runs, first):
                for i in run:
                    buckets[i] = bucket
                used = max(used, bucket)
        first = used + 1
    result = (
        replace(m, owner=owner, bucket=bucket)
        for m, owner, bucket in zip(matrices, owners, buckets, strict=True)
    )
    return DomainAssignment(num_ranks, tuple(result), first)


def _more(count: int, what: str) -> list[str]:
    return [f"  ... and {count} more {what}"] if count > 0 else []


def _si(number: float) -> str:
    power = min(int(math.log10(number)) // 3, 5) if number >= 1000 else 0
    return f"{number / 1000**power:.{0 if power == 0 else 2}f} {['', 'k', 'M', 'G', 'T', 'P'][power]}"

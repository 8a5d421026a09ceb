"""Assigns each of the model's matrices to a rank and a bucket. Frozen.

A rank's matrices, equal shapes side by side, are cut into runs of about ``bucket_bytes``; bucket k is the
k-th run of every rank. So a bucket gives each rank about the same work, and equal shapes are computed as one batch.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from block_optim.core.assign import Job, assign, digest
from block_optim.core.scratch import packed
from block_optim.muon.matrices import Matrix

SENT_BYTES = 2  # elements travel as bf16: Newton-Schulz rounds its input to it, and returns it


@dataclass(frozen=True)
class AssignedMatrix:
    """One matrix, the ranks that hold it, its owner and its bucket."""

    name: str  # the parameter's, with the matrix's number where it has several
    param: int  # index of the parameter in the optimizer
    group: int  # index of its param group
    matrix: Matrix  # its place in the parameter
    # (rank, elements) of each rank that holds some of it, in the order of ranks; () where each holds all
    holders: tuple[tuple[int, int], ...]
    flops: int  # cost of its orthogonalisation
    copies: int = 0  # how many ranks hold all of it, where these divide the work; else 0
    owner: int = 0  # the rank that computes it
    bucket: int = 0  # number of its bucket

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix in an exchange."""
        return self.matrix.numel * SENT_BYTES

    @property
    def moved(self) -> int:
        """Elements that are not at the owner: they travel there, and as many back."""
        return sum(count for rank, count in self.holders if rank != self.owner)

    def lengths(self) -> int | Sequence[tuple[int, int]]:
        """Its lengths in an exchange: its holders, or of copies its elements."""
        return self.matrix.numel if self.copies else self.holders

    def side_lengths(self) -> int | Sequence[tuple[int, int]]:
        """Its lengths in NorMuon's side exchange: a number for each row, and one for the matrix."""
        if self.copies:
            return self.matrix.rows + 1
        return [(rank, count // self.matrix.columns + 1) for rank, count in self.holders]

    @property
    def bytes_sent(self) -> int:
        """Bytes that all ranks together send for it in a step. Of copies, only updates travel, to each other rank."""
        return SENT_BYTES * (2 * self.moved + max(self.copies - 1, 0) * self.matrix.numel)


@dataclass(frozen=True)
class DomainAssignment:
    """The matrices that one process group exchanges; matrices that are not exchanged are a group of one rank."""

    num_ranks: int
    matrices: tuple[AssignedMatrix, ...]
    num_buckets: int

    @property
    def loads(self) -> tuple[int, ...]:
        """FLOPs of each rank in a step."""
        result = [0] * self.num_ranks
        for m in self.matrices:
            result[m.owner] += m.flops
        return tuple(result)

    @property
    def imbalance(self) -> float:
        """The largest load over the mean: 1 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * self.num_ranks / total if total else 1.0

    @property
    def bytes_moved(self) -> int:
        """Bytes that all ranks together send in a step, to the owners and back."""
        return sum(m.bytes_sent for m in self.matrices)

    @property
    def fingerprint(self) -> int:
        """Equal on ranks whose assignments are equal."""
        return digest(self.num_ranks, self.num_buckets, self.matrices)


@dataclass(frozen=True)
class Assignment:
    """The owner of each matrix, one `DomainAssignment` for each process group."""

    domains: tuple[DomainAssignment, ...]


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
    result = [replace(m, owner=o, bucket=b) for m, o, b in zip(matrices, owners, buckets, strict=True)]
    return DomainAssignment(num_ranks, tuple(result), first)

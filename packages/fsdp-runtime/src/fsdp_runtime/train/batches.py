"""Which sequences make up which batch: arithmetic on a global index, so that there is nothing to save but a count.

Sequence number g of a run, counted over all steps and ranks, is window ``permute(g % windows)`` of epoch
``g // windows``. Step s takes numbers s*B ... s*B + B - 1; microbatch a and rank r take theirs from that by
position. So global batches do not depend on the number of ranks, and a run resumes at any batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ragged_shard import is_cpu

from .corpus import Corpus
from .errors import TrainError

_ROUNDS = 4


def _mix(values: Any, key: int) -> Any:
    """A 64-bit hash of each value (the finaliser of splitmix64)."""
    x = values.astype(np.uint64) + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(positions: Any, count: int, seed: int) -> Any:
    """Where a seeded permutation of ``range(count)`` sends `positions`, without building it.

    A Feistel network permutes the power of four that covers `count`; results outside walk on until inside.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    x = np.asarray(positions, dtype=np.uint64)
    pending = np.ones(x.shape, dtype=bool)
    with np.errstate(over="ignore"):
        while pending.any():
            left, right = x[pending] >> np.uint64(half), x[pending] & mask
            for turn in range(_ROUNDS):
                left, right = right, left ^ (_mix(right, seed * 0x9E3779B97F4A7C15 + turn) & mask)
            x[pending] = (left << np.uint64(half)) | right
            pending &= x >= count
    return x.astype(np.int64)


@dataclass(frozen=True)
class Batches:
    """The batches of one corpus, cut into windows of `seq_len` tokens and the one that follows.

    Args:
        corpus: where tokens come from.
        seq_len: tokens of a sequence.
        batch: sequences of a global batch.
        accumulate: microbatches of a batch.
        rank, world_size: whose part is read.
        seed: of the shuffle; None keeps the order (held-out text).
        vocab_size: tokens must be below it.
        slice_number, slices: which of equal slices of each sequence is read.

    Raises:
        TrainError: a corpus shorter than a sequence.
    """

    corpus: Corpus
    seq_len: int
    batch: int
    accumulate: int
    rank: int
    world_size: int
    seed: int | None
    vocab_size: int
    slice_number: int = 0
    slices: int = 1

    def __post_init__(self) -> None:
        assert self.batch % (self.world_size * self.accumulate) == 0  # RunConfig.check says what would fit
        if self.num_windows < 1:
            raise TrainError(
                f"a sequence of {self.seq_len} is longer than the data ({self.corpus.num_tokens})"
            )

    @property
    def num_windows(self) -> int:
        """Sequences of an epoch."""
        return (self.corpus.num_tokens - 1) // self.seq_len

    def epoch(self, step: int) -> float:
        """How often the data has been gone through before `step`."""
        return step * self.batch / self.num_windows

    def windows(self, step: int) -> Any:
        """The windows of step's global batch, in order: (batch,)."""
        numbers = np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64)
        epochs, positions = np.divmod(numbers, self.num_windows)
        if self.seed is None:
            return positions
        out = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = permute(positions[chosen], self.num_windows, self.seed * 1_000_003 + int(epoch))
        return out

    def microbatches(self, step: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's part of step's batch: (tokens, next tokens) for each microbatch, int64 (rows, seq_len)."""
        mine = self.windows(step).reshape(self.accumulate, self.world_size, -1)[:, self.rank]
        return [self._read(windows, device) for windows in mine]

    def _read(self, windows: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [int(window) * self.seq_len for window in windows]
        rows = np.stack([self.corpus.read(start, start + self.seq_len + 1) for start in starts])
        if rows.max() >= self.vocab_size or rows.min() < 0:
            bad = int(np.argmax((rows.max(axis=1) >= self.vocab_size) | (rows.min(axis=1) < 0)))
            raise TrainError(
                f"{self.corpus.name_at(starts[bad])} has tokens from {rows[bad].min()} to {rows[bad].max()}, "
                f"the vocabulary has {self.vocab_size}: say --vocab-size"
            )
        length = self.seq_len // self.slices
        first = self.slice_number * length
        tokens = torch.from_numpy(rows[:, first : first + length + 1])
        if not is_cpu(device):
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

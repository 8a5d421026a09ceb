"""Training and held-out files, their tokens as one long run, and the sequences of each batch.

Text files are bytes as tokens (256 of them); `.bin` files are token arrays, mapped, not read. A corpus is a list of
arrays and the position of each; nothing is copied.

Sequence number g of a run, counted over all steps and ranks, is window ``permute(g % windows)`` of epoch
``g // windows``. Step s takes numbers s*B ... s*B + B - 1; microbatch a and rank r take theirs from that by
position. So global batches do not depend on the number of ranks, and a run resumes at any batch.
"""

import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import TrainError
from .hardware import to_device

ARRAYS = ".bin"
HELD_OUT_SHARE = 0.05  # of files; of each file's end where files are too few to split
_BYTES = 256


@dataclass(frozen=True)
class Corpus:
    """Token arrays end to end. `names` are for messages."""

    arrays: tuple[Any, ...]
    names: tuple[str, ...]
    starts: Any  # (files + 1,) int64, in tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of all files."""
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> Any:
        """Tokens [start, stop) as int64, also across files."""
        first, last = np.searchsorted(self.starts, [start, stop - 1], side="right") - 1
        begins = self.starts[first : last + 1]
        files = zip(self.arrays[first : last + 1], begins, strict=True)
        parts = [array[max(start - begin, 0) : stop - begin] for array, begin in files]
        return np.concatenate(parts, dtype=np.int64)


@dataclass(frozen=True)
class TextData:
    """A training and a held-out corpus over one vocabulary; `identity` differs between data sets."""

    train: Corpus
    held_out: Corpus
    vocab_size: int
    source: str
    identity: str


def read_data(
    paths: Sequence[str], *, dtype: str, vocab_size: int | None, held_out: Sequence[str], seq_len: int
) -> TextData:
    """Find and split the files, and open them.

    Args:
        paths: files, folders or globs; empty for the text of this interpreter's standard library.
        dtype: of `.bin` files.
        vocab_size: of token arrays; None for text.
        held_out: files, folders or globs to hold out; empty to split `paths` by a hash of each file's name.
        seq_len: sequences that both sides must have at least one of.

    Raises:
        TrainError: no files, an unreadable or empty one, text and arrays mixed, tokens that do not fit the
            vocabulary, or too few tokens for one sequence.
    """
    files = _expand(paths) if paths else _standard_library()
    where = ", ".join(paths) or f"the standard library's text in {sysconfig.get_paths()['stdlib']}"
    chosen = {name: path for name, path in files.items() if _is_held_out(name)}
    held = _expand(held_out) if held_out else chosen
    held_paths = {path.resolve() for path in held.values()}
    train = {name: path for name, path in files.items() if path.resolve() not in held_paths}
    if len({path.suffix == ARRAYS for path in (*train.values(), *held.values())}) > 1:
        raise TrainError("the data mixes text with token arrays (.bin): give one kind, such as by a glob")
    # Files of the two sides may have one name, as in two folders.
    opened = [{name: _open(path, dtype) for name, path in side.items()} for side in (train, held)]
    size = _vocabulary([array for side in opened for array in side.values()], vocab_size)
    sides = [_joined(side) for side in opened]
    if min(side.num_tokens for side in sides) <= seq_len and not held_out:  # hold out the ends of files
        both = {**opened[0], **opened[1]}
        arrays = {name: both[name] for name in files if name in both}  # not links to held-out files
        ends = {name: len(array) - int(2 * HELD_OUT_SHARE * len(array)) for name, array in arrays.items()}
        sides = [
            _joined({name: array[: ends[name]] for name, array in arrays.items()}),
            _joined({name: array[ends[name] :] for name, array in arrays.items()}),
        ]
    for side, label in zip(sides, ("training", "held-out"), strict=True):
        if side.num_tokens <= seq_len:
            raise TrainError(
                f"a sequence of {seq_len} tokens is longer than the {label} data ({side.num_tokens} tokens of "
                f"{where}, {len(files)} files): give more with --data or a shorter --seq-len"
            )
    lengths = [[(n, len(a)) for n, a in zip(side.names, side.arrays, strict=True)] for side in sides]
    identity = hashlib.sha256("".join(map(repr, lengths)).encode()).hexdigest()[:16]
    return TextData(sides[0], sides[1], size, where, identity)


def _standard_library() -> dict[str, Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = (path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    files = {str(path.relative_to(root)): path for path in paths if path.is_file() and path.stat().st_size}
    if not files:
        raise TrainError(f"this Python has no standard library text in {root}: give text with --data PATH")
    return dict(sorted(files.items()))


def _expand(paths: Sequence[str]) -> dict[str, Path]:
    """Files by name, relative to the folder in `paths`, so that data may move."""
    files: dict[str, Path] = {}
    for pattern in paths:
        path = Path(pattern).expanduser()
        if path.is_dir():
            names = {str(p.relative_to(path)): p for p in path.rglob("*") if p.is_file()}
            matches = {n: p for n, p in names.items() if not n.startswith(".") and "/." not in n}
        elif path.exists():
            matches = {path.name: path}
        else:
            matches = {p.name: p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()}
        if not matches:
            raise TrainError(f"no data: {pattern!r} matches no file")
        for name, file in matches.items():
            files[name if name not in files else str(file)] = file
    return dict(sorted(files.items()))


def _is_held_out(name: str) -> bool:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def _open(path: Path, dtype: str) -> Any:
    try:
        if path.suffix == ARRAYS:
            size = path.stat().st_size
            if size % np.dtype(dtype).itemsize:
                raise TrainError(f"{path} is not an array of {dtype}: {size} bytes; add --dtype")
            return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
        raw = path.read_bytes()
    except OSError as error:
        raise TrainError(f"cannot read {path}: {error.strerror}") from error
    if b"\0" in raw[:8192]:
        raise TrainError(f"{path} is not text (it has zero bytes): leave it out, by a glob for instance")
    return np.frombuffer(raw, dtype=np.uint8)


def _joined(arrays: dict[str, Any]) -> Corpus:
    arrays = {name: array for name, array in arrays.items() if len(array)}
    return Corpus(tuple(arrays.values()), tuple(arrays), np.cumsum([0, *map(len, arrays.values())]))


def _vocabulary(arrays: Sequence[Any], asked: int | None) -> int:
    if all(array.dtype == np.uint8 for array in arrays):
        if asked is not None and asked < _BYTES:
            raise TrainError(f"--vocab-size {asked} is too small for bytes, expected at least {_BYTES}")
        return asked or _BYTES
    if asked is None:
        raise TrainError("token arrays need --vocab-size")
    return asked  # batches are checked as they are read


def _mix(values: Any, key: int) -> Any:
    """A 64-bit hash of each value (the finaliser of splitmix64)."""
    x = values.astype(np.uint64) + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(positions: Any, count: int, seed: int) -> Any:
    """Map `positions` through a seeded permutation of ``range(count)``, without building it.

    A Feistel network permutes the power of four that covers `count`; results outside walk on until inside.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    x = np.asarray(positions, dtype=np.uint64)
    pending = np.ones(x.shape, dtype=bool)
    with np.errstate(over="ignore"):
        while pending.any():
            left, right = x[pending] >> np.uint64(half), x[pending] & mask
            for turn in range(4):  # rounds of the network
                left, right = right, left ^ (_mix(right, seed * 0x9E3779B97F4A7C15 + turn) & mask)
            x[pending] = (left << np.uint64(half)) | right
            pending &= x >= count
    return x.astype(np.int64)


@dataclass(frozen=True)
class Batches:
    """The batches of one corpus, cut into windows of `seq_len` tokens and the one that follows, shuffled by `seed`.

    A global batch has `batch` sequences, in `accumulate` microbatches, of which `rank` of `world_size` reads its part.
    Tokens must be below `vocab_size`.
    """

    corpus: Corpus
    seq_len: int
    batch: int
    accumulate: int
    rank: int
    world_size: int
    seed: int
    vocab_size: int

    def __post_init__(self) -> None:
        assert self.batch % (self.world_size * self.accumulate) == 0  # RunConfig.check refuses others

    @property
    def num_windows(self) -> int:
        """Sequences of an epoch."""
        return (self.corpus.num_tokens - 1) // self.seq_len

    def windows(self, step: int) -> Any:
        """The windows of step's global batch, in order: (batch,)."""
        numbers = np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64)
        epochs, positions = np.divmod(numbers, self.num_windows)
        out = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = permute(positions[chosen], self.num_windows, self.seed * 1_000_003 + int(epoch))
        return out

    def microbatches(self, step: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's part of step's batch: (tokens, next tokens) for each microbatch, int64 (rows, seq_len)."""
        windows_of_rank = self.windows(step).reshape(self.accumulate, self.world_size, -1)[:, self.rank]
        return [self._read(windows, device) for windows in windows_of_rank]

    def _read(self, windows: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [int(window) * self.seq_len for window in windows]
        rows = np.stack([self.corpus.read(start, start + self.seq_len + 1) for start in starts])
        if rows.max() >= self.vocab_size or rows.min() < 0:
            bad = int(np.argmax((rows.max(axis=1) >= self.vocab_size) | (rows.min(axis=1) < 0)))
            file = int(np.searchsorted(self.corpus.starts, starts[bad], side="right")) - 1
            raise TrainError(
                f"{self.corpus.names[file]} has tokens from {rows[bad].min()} to {rows[bad].max()}, "
                f"the vocabulary has {self.vocab_size}: add --vocab-size"
            )
        tokens = to_device(torch.from_numpy(rows), device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

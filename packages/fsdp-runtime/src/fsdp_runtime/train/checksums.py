"""Checksums of a checkpoint's files: written with it, verified before it is loaded.

    sums-R.json   of rank R's files, a sum for each tensor: {file: {"bytes", "parts": [[name, offset, length, sum]]}}
    sums.json     of .metadata, run.json and every sums-R.json: {"files": {file: [bytes, sum]}, "sum": of "files"}

Sums are CRC-32: they find broken hardware, files that were cut off or mixed up, not forgery. They are of what is read
back from the file after it was written.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

SUMS = "sums.json"
METADATA = ".metadata"  # DCP's
RUN_FILE = "run.json"
_PIECE = 1 << 22  # bytes read at a time
# What reading JSON of another shape raises.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class SummingWriter(FileSystemWriter):
    """DCP's writer, which also writes the checksums. Files of one rank are summed by that rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, sync_files=True, overwrite=True)
        self._folder, self._rank = folder, rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files and their sums."""
        written = super().write_data(plan, planner)
        files: dict[str, Any] = {}
        for result in written.wait():
            where = result.storage_data
            parts = files.setdefault(where.relative_path, {"bytes": 0, "parts": []})["parts"]
            parts.append([result.index.fqn, where.offset, where.length])
        for name, entry in files.items():
            path = self._folder / name
            entry["bytes"] = path.stat().st_size
            with path.open("rb") as file:
                for part in entry["parts"]:
                    part.append(_sum_of(file, part[1], part[2]))
        write_synced(self._folder / _sums_of_rank(self._rank), json.dumps(files))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On one rank, when all have written: write the metadata, and the sums of what has no tensors in it."""
        super().finish(metadata, results)
        names = [METADATA, RUN_FILE, *(_sums_of_rank(rank) for rank in range(len(results)))]
        files = {name: _whole(self._folder / name) for name in names}
        write_synced(self._folder / SUMS, json.dumps({"sum": _sum_of_json(files), "files": files}))


def has_sums(folder: Path) -> bool:
    """Whether a checkpoint was written with checksums; those of version 0.1.0 were not."""
    return any(folder.glob("sums*.json"))


def find_damage(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """What of a checkpoint is not as it was written: a line for each file, with its tensors. Empty if nothing.

    Args:
        folder: the checkpoint.
        share, shares: which part of the work to do, so that ranks can divide it: of the files of N writing ranks, those
            whose rank leaves the remainder `share`.
    """
    try:
        sums = json.loads((folder / SUMS).read_text())
        files = {str(name): (int(size), int(total)) for name, (size, total) in sums["files"].items()}
        if sums["sum"] != _sum_of_json(sums["files"]) or not {METADATA, RUN_FILE} <= files.keys():
            return [f"{SUMS}: damaged"]
    except FileNotFoundError:
        return [f"{SUMS}: missing"]
    except (OSError, *MALFORMED) as error:
        return [f"{SUMS}: {_reason(error)}"]
    of_ranks = [name for name in files if name not in (METADATA, RUN_FILE)]
    mine = of_ranks[share::shares] + ([METADATA, RUN_FILE] if share == 0 else [])
    return [line for name in mine for line in _damage_of(folder, name, *files[name], data=name in of_ranks)]


def is_as_written(folder: Path, name: str) -> bool:
    """Whether a small file of a checkpoint has the sum that was written with it; True for one without sums."""
    try:
        files = json.loads((folder / SUMS).read_text())["files"]
        return bool(files[name] == _whole(folder / name))
    except FileNotFoundError:
        return not has_sums(folder)
    except (OSError, *MALFORMED):
        return False


def _damage_of(folder: Path, name: str, size: int, total: int, *, data: bool) -> Iterator[str]:
    """Of one file that the sums name; `data`: and of those that it names in turn."""
    try:
        if _whole(folder / name) != [size, total]:
            yield f"{name}: damaged"
            return
        entries = json.loads((folder / name).read_text()) if data else {}
        for file, entry in entries.items():
            yield from _damage_of_tensors(folder / file, entry["bytes"], entry["parts"])
    except (OSError, *MALFORMED) as error:  # what the sums name has a line of its own
        yield f"{name}: {_reason(error)}"


def _damage_of_tensors(path: Path, size: int, parts: Iterable[Any]) -> Iterator[str]:
    parts = [(str(name), int(start), int(length), total) for name, start, length, total in parts]
    try:
        with path.open("rb") as file:
            bad = [name for name, start, length, total in parts if _sum_of(file, start, length) != total]
            found = os.fstat(file.fileno()).st_size
    except OSError as error:
        names = ", ".join(name for name, *_ in parts)
        yield f"{path.name}: {_reason(error)}; it held {names}"
        return
    if bad or found != size:
        cut = "" if found == size else f"{found} bytes, expected {size}; "
        yield f"{path.name}: {cut}{', '.join(bad) or 'no tensor'} damaged"


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    return (isinstance(error, OSError) and error.strerror) or "damaged"


def _sums_of_rank(rank: int) -> str:
    return f"sums-{rank}.json"


def _whole(path: Path) -> list[int]:
    """Bytes and sum of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        return [size, _sum_of(file, 0, size)]


def _sum_of(file: BinaryIO, start: int, length: int) -> int:
    file.seek(start)
    total = 0
    while length > 0 and (piece := file.read(min(length, _PIECE))):
        total = zlib.crc32(piece, total)
        length -= len(piece)
    return total if length == 0 else -1  # the file is too short


def _sum_of_json(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def write_synced(path: Path, text: str) -> None:
    """Write a small file; it is on disk on return."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

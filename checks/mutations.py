"""Damage to real files: bits, bytes, and values inside of JSON. Every choice comes from one generator."""

import copy
import json
from random import Random
from typing import Any

_INTS = [0, 1, -1, 2, 7, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30]
NASTY: list[Any] = [
    None, True, False, 0.5, -0.0, float("nan"), float("inf"), 1e308, "", "x", "\n", "a\nb", "../x", "/etc/passwd", "\0",
    "\ud800", "é" * 50, "x" * 5000, "9" * 5000, [], {}, [[]], [0], [-1], [None], {"": 0}, {"a": {}}, [0] * 300, *_INTS,
]  # fmt: skip


def damaged(draw: Random, data: bytes, donors: list[bytes]) -> bytes:
    """Bytes with one to four changes; `donors` are files to take pieces from."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = draw.choice(_CHANGES)(draw, data, donors)
    return data


def _flip(draw: Random, data: bytes, donors: list[bytes]) -> bytes:
    if not data:
        return b"\0"
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


def _cut(draw: Random, data: bytes, donors: list[bytes]) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _insert(draw: Random, data: bytes, donors: list[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    piece = draw.choice(
        (draw.randbytes(draw.randrange(1, 20)), b"[" * 2000, b"\0" * 64, b"9" * 30, b"\xff\xfe")
    )
    return data[:at] + piece + data[at:]


def _remove(draw: Random, data: bytes, donors: list[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + data[at + draw.randrange(1, 40) :]


def _repeat(draw: Random, data: bytes, donors: list[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + data[at : at + draw.randrange(1, 60)] * 2 + data[at:]


def _overwrite(draw: Random, data: bytes, donors: list[bytes]) -> bytes:
    at, length = draw.randrange(len(data) + 1), draw.choice((1, 2, 4, 8))
    number = draw.choice(_INTS) % 2 ** (8 * length)
    return data[:at] + number.to_bytes(length, draw.choice(("little", "big"))) + data[at + length :]


def _splice(draw: Random, data: bytes, donors: list[bytes]) -> bytes:
    other = draw.choice(donors)
    at, begin = draw.randrange(len(data) + 1), draw.randrange(len(other) + 1)
    return data[:at] + other[begin : begin + draw.randrange(1, 200)] + data[at + draw.choice((0, 20)) :]


def _digits(draw: Random, data: bytes, donors: list[bytes]) -> bytes:
    places = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return data
    at = draw.choice(places)
    return (
        data[:at] + draw.choice((b"0", b"7", b"-1", b"1e9", b"99999999999999999999", b"NaN")) + data[at + 1 :]
    )


_CHANGES = (_flip, _flip, _cut, _insert, _remove, _repeat, _overwrite, _splice, _digits, _digits)


def damaged_json(draw: Random, content: Any) -> Any:
    """A copy of plain data in which one to three values, keys or places have changed."""
    content = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 2, 3))):
        content = _changed(draw, content)
    return content


def _changed(draw: Random, content: Any) -> Any:
    path: list[tuple[Any, Any]] = []
    place = content
    while isinstance(place, (dict, list)) and place and (not path or draw.random() < 0.8):
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
        path.append((place, key))
        place = place[key]
    if not path:
        return draw.choice(NASTY)
    parent, key = path[-1]
    how = draw.randrange(6)
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[draw.choice(("x", "", "a\nb", "\ud800", "../x", "y" * 3000))] = parent.pop(key)
    elif how == 1:
        parent.append(copy.deepcopy(place))
    elif how == 2 and type(place) is int:
        parent[key] = place + draw.choice((1, -1, 8, place, 2**40))
    elif how == 3:
        parent[key] = [place]
    else:
        parent[key] = copy.deepcopy(draw.choice(NASTY))
    return content


def damaged_text(draw: Random, text: bytes, donors: list[bytes]) -> bytes:
    if draw.random() < 0.3:
        return damaged(draw, text, donors)
    return json.dumps(damaged_json(draw, json.loads(text))).encode()

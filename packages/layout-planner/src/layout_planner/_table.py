"""Markdown tables that also read well in a terminal, and number formats for their cells."""

from collections.abc import Sequence

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. A header's leading "<" aligns its column to the left, others are to the right."""
    left = [header.startswith("<") for header in headers]
    names = [header.removeprefix("<") for header in headers]
    widths = [max(3, *map(len, column)) for column in zip(names, *rows, strict=True)]
    rules = ["-" * w if to_left else "-" * (w - 1) + ":" for w, to_left in zip(widths, left, strict=True)]

    def line(cells: Sequence[str]) -> str:
        places = zip(cells, widths, left, strict=True)
        padded = (cell.ljust(width) if to_left else cell.rjust(width) for cell, width, to_left in places)
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(line, [names, rules, *rows]))


def percent(ratio: float) -> str:
    """A ratio in per cent with two decimals below 10, one below 100, else none; "0 %" is exact."""
    value = 100 * ratio
    if value == 0:
        return "0 %"
    if 0 < value < 0.005:
        return "<0.01 %"
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{places}f} %"


def size(bytes_: float) -> str:
    """Bytes with three digits in the largest decimal unit that keeps the number at 1 or above."""
    for unit, name in _UNITS:
        if bytes_ >= unit:
            value = bytes_ / unit
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"
    return f"{bytes_:.0f} B"

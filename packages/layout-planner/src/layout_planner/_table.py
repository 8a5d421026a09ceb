"""Markdown tables that also read well in a terminal, and number formats for their cells."""

from collections.abc import Sequence

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


class Table:
    """A Markdown table, made line by line so that rows can be printed as they become ready.

    Args:
        headers: one per column. A leading "<" aligns the column to the left, others to the right.
        widths: minimum width of each column in characters, so that later rows align too.
    """

    def __init__(self, headers: Sequence[str], widths: Sequence[int]) -> None:
        self._left = [header.startswith("<") for header in headers]
        self._headers = [header.removeprefix("<") for header in headers]
        pairs = zip(self._headers, widths, strict=True)
        self._widths = [max(len(header), width, 3) for header, width in pairs]

    def head(self) -> str:
        """The two lines above the rows."""
        rules = [
            "-" * width if left else "-" * (width - 1) + ":"
            for width, left in zip(self._widths, self._left, strict=True)
        ]
        return f"{self.row(self._headers)}\n{self.row(rules)}"

    def row(self, cells: Sequence[str]) -> str:
        """One line."""
        places = zip(cells, self._widths, self._left, strict=True)
        padded = (cell.ljust(width) if left else cell.rjust(width) for cell, width, left in places)
        return f"| {' | '.join(padded)} |"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose rows are all known; headers as for `Table`."""
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(len(headers))]
    table = Table(headers, widths)
    return "\n".join([table.head(), *map(table.row, rows)])


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

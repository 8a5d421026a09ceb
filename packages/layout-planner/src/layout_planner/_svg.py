"""A picture of a layout, to scale.

    title
    figures: elements, padded, padding, lower bound, gap, ranks
             S0 = 3,133,440                     S1 = 5,760
    rank 0  [ q_proj |||||| k_proj |||/////]  [ o_proj ||//]      one row per rank, one column per segment
    rank 1  [ ...                          ]  [            ]
    legend: number and colour, name, shape, block, ranks

Ticks are cut points. Equal layouts give equal text.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from layout_planner._segment import Segment
from layout_planner._spec import TensorSpec

_WIDTH, _MARGIN, _GUTTER = 1280, 28, 64
_ROW, _ROW_GAP = 24, 6
_SEGMENT_GAP, _LEAST_SEGMENT = 16, 96
_TICK, _TICK_LENGTH = 4, 5  # px between ticks at least, px of each tick
_LEAST_TENSOR = 0.8  # px; anything less would be invisible
_LEGEND_ROW, _CELL_GAP, _COLUMN_GAP = 20, 11, 20
_LEGEND = ("tensor", "shape", "block", "a tick is", "on ranks")
_DEFAULT_RANKS = 16
_STEPS = [digit * 10**power for power in range(20) for digit in (1, 2, 5)]  # of ticks and of the scale bar

_INK, _MUTED, _FAINT, _LINE = "#1b1f24", "#57606a", "#d8dee4", "#8c959f"
# Light enough for dark text on them; neighbours in this list are far apart in hue.
_PALETTE = (
    "#8ab6f0", "#f5b971", "#8fd19e", "#e79aa8", "#b9a5e8", "#f2dd78", "#7fcfd0", "#d9b38c",
    "#b5d46c", "#efa3d6", "#9fb4c7", "#f09f7d", "#6fc3a7", "#c9a0c9", "#dcc46a", "#93a7ee",
)  # fmt: skip
_NARROW, _WIDE = frozenset("fijlrt.,:;'|!()[]{} "), frozenset("mwMW@%")


def draw(
    segments: Sequence[Segment],
    specs: Mapping[str, TensorSpec],
    world_size: int,
    figures: Sequence[tuple[str, str]],
    *,
    title: str = "",
    ranks: range | None = None,
) -> str:
    """A layout as an SVG document; a layout without tensors gives a picture that says so.

    Args:
        segments: the buffers.
        specs: the tensors in them, by name.
        world_size: shards of each buffer.
        figures: labels and values to print above the picture.
        title: a line above the picture.
        ranks: the ranks to draw, one row each. None: the first 16.

    Raises:
        ValueError: `ranks` is empty or reaches outside the world size.
    """
    if ranks is None:
        ranks = range(min(world_size, _DEFAULT_RANKS))
    if not ranks or min(ranks) < 0 or max(ranks) >= world_size:
        raise ValueError(
            f"cannot draw ranks {ranks}: expected one or more of the {world_size} ranks 0..{world_size - 1}"
        )
    picture = _Picture(segments, specs, world_size, ranks)
    body: list[str] = []
    y = _MARGIN
    if title:
        y += 18
        body.append(_text(_MARGIN, y, fitting(title, _WIDTH - 2 * _MARGIN, 18), size=18, weight="bold"))
        y += 16
    body += picture.figures(y, figures)
    y += 58
    body += picture.rows(y)
    y += picture.rows_height + 12
    body += picture.legend(y)
    height = y + picture.legend_height + _MARGIN
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH} {height:g}" font-family="sans-serif" role="img">',
        f"<title>{escape(title or 'layout')}</title>",
        '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>'
        '<rect width="1.6" height="6" fill="#b9c0c8"/></pattern></defs>',
        f'<rect x="0.00" y="0" width="{_WIDTH}.00" height="{height:g}" fill="#ffffff" rx="8"/>',
    ]
    return "\n".join([*head, *body, "</svg>", ""])


class _Picture:
    """One drawing: its figures, rows and legend, and the sizes they share."""

    def __init__(
        self, segments: Sequence[Segment], specs: Mapping[str, TensorSpec], world_size: int, ranks: range
    ) -> None:
        self.segments, self.specs = segments, specs
        self.world_size, self.ranks = world_size, ranks
        self.positions = {
            name: (index, offset)
            for index, segment in enumerate(segments)
            for name, offset in zip(segment.names, segment.offsets, strict=True)
        }
        self.numbers = {name: place for place, name in enumerate(self.positions, 1)}
        by_size = sorted(self.numbers, key=lambda name: (-specs[name].numel, self.numbers[name]))
        self.colours = dict(zip(by_size, colours(len(by_size)), strict=True))
        self.widths = _segment_widths(segments)
        self.widened = [
            f"S{index}"
            for index, segment in enumerate(segments)
            if self.widths[index] * segments[0].shard_size > 1.001 * self.widths[0] * segment.shard_size
        ]
        self.rows_height = 24 + len(ranks) * (_ROW + _ROW_GAP) + 20 if segments else 36
        self.columns = 1 if len(by_size) <= 6 else 2
        self.lines = -(-len(by_size) // self.columns)
        self.legend_height = 32 + (self.lines + 1) * _LEGEND_ROW + (20 if self.widened else 0)

    def figures(self, top: float, figures: Sequence[tuple[str, str]]) -> Iterator[str]:
        """A strip of labelled figures."""
        drawn = ("ranks drawn", f"{len(self.ranks)} of {self.world_size:,}")
        step = (_WIDTH - 2 * _MARGIN) / (len(figures) + 1)
        for place, (label, value) in enumerate([*figures, drawn]):
            x = _MARGIN + place * step
            yield _text(x, top + 12, label, fill=_MUTED)
            yield _text(x, top + 32, fitting(value, step - 8, 16), size=16, weight="bold")

    def rows(self, top: float) -> Iterator[str]:
        """One row per rank, the segments side by side, and above them their shard sizes."""
        if not self.segments:
            yield _text(_MARGIN, top + 14, "This group has no tensors.", size=12, fill=_MUTED)
            return
        tops = [top + 24 + place * (_ROW + _ROW_GAP) for place in range(len(self.ranks))]
        x: float = _MARGIN + _GUTTER
        for index, (segment, width) in enumerate(zip(self.segments, self.widths, strict=True)):
            sign = f"S{index}" if len(self.segments) > 1 else "S"
            label = f"{sign} = {segment.shard_size:,}"
            if text_width(label, 12) <= width:
                yield _text(x, top + 12, label, size=12, weight="bold")
            for rank, y in zip(self.ranks, tops, strict=True):
                yield from self._shard(segment, rank, x, y, width)
            x += width + _SEGMENT_GAP
        for rank, y in zip(self.ranks, tops, strict=True):
            label = f"rank {rank}"
            yield _text(_MARGIN + _GUTTER - 10, y + _ROW / 2 + 4, label, fill=_MUTED, anchor="end")
        y = top + self.rows_height - 8
        left = self.world_size - len(self.ranks)
        if left:
            note = f"{left:,} more {'rank' if left == 1 else 'ranks'} not drawn"
            yield _text(_MARGIN + _GUTTER, y, note, fill=_MUTED)
        scale = self.widths[0] / self.segments[0].shard_size
        elements = max((step for step in _STEPS if step * scale <= 140), default=1)
        right, start = _WIDTH - _MARGIN, _WIDTH - _MARGIN - elements * scale
        bar = f"M{start:.2f} {y - 8}v8M{start:.2f} {y - 4}H{right}M{right} {y - 8}v8"
        yield f'<path d="{bar}" stroke="{_MUTED}" fill="none"/>'
        label = f"{elements:,} {'element' if elements == 1 else 'elements'}"
        yield _text(start - 8, y, label, fill=_MUTED, anchor="end")

    def _shard(self, segment: Segment, rank: int, x: float, y: float, width: float) -> Iterator[str]:
        """One rank's shard of one segment: the padding pattern, with tensors drawn over it."""
        scale = width / segment.shard_size
        yield _rect(x, y, width, _ROW, "url(#padding)")
        for name, offset in zip(segment.names, segment.offsets, strict=True):
            start, stop = segment.local_range(offset, self.specs[name].numel, rank)
            if start == stop:
                continue
            wide = max((stop - start) * scale, _LEAST_TENSOR)
            left = min(x + (offset + start - rank * segment.shard_size) * scale, x + width - wide)
            yield f"<g><title>{escape(f'{name}, rank {rank}: elements {start} to {stop}')}</title>"
            yield _rect(left, y, wide, _ROW, self.colours[name])
            places = [left + (cut - start) * scale for cut in self._cuts(name, start, stop, scale)]
            if places:
                gap = _ROW - 2 * _TICK_LENGTH  # for the name
                ticks = "".join(f"M{at:.2f} {y:g}v{_TICK_LENGTH}m0 {gap}v{_TICK_LENGTH}" for at in places)
                yield f'<path d="{ticks}" stroke="#ffffff"/>'
            labels = (*_shortened(name), str(self.numbers[name]))
            label = next((label for label in labels if text_width(label, 11) + 10 <= wide), None)
            if label is not None:
                opacity = "" if start == 0 else "0.7"
                yield _text(left + wide / 2, y + _ROW / 2 + 4, label, anchor="middle", opacity=opacity)
            yield "</g>"
        yield _rect(x, y, width, _ROW, "none", stroke=_LINE)

    def _cuts(self, name: str, start: int, stop: int, scale: float) -> Iterator[int]:
        """Cut points inside the elements [start, stop) of the tensor, as many as there are ticks for."""
        grid = self.specs[name].grid
        stride, whole_periods = self._stride(name, scale)
        if whole_periods or grid.uniform:
            step = stride * (grid.period if whole_periods else grid.block)
            yield from range((start // step + 1) * step, stop, step)
            return
        step = stride * grid.block
        for begin in range(start - start % grid.period, stop, grid.period):
            yield from (cut for cut in range(begin, begin + grid.period, step) if start < cut < stop)

    def _stride(self, name: str, scale: float) -> tuple[int, bool]:
        """Blocks per tick; or periods per tick, and True, where ticks at blocks would be too dense."""
        grid = self.specs[name].grid
        blocks = next(step for step in _STEPS if step >= _TICK / (grid.block * scale))
        if not grid.uniform and blocks * grid.block > grid.period / 2:
            return next(step for step in _STEPS if step >= _TICK / (grid.period * scale)), True
        return blocks, False

    def legend(self, top: float) -> Iterator[str]:
        """All tensors with number, colour, name, shape, block and ranks; then the meaning of ticks and hatching."""
        yield f'<path d="M{_MARGIN} {top}H{_WIDTH - _MARGIN}" stroke="{_FAINT}"/>'
        width = (_WIDTH - 2 * _MARGIN - _COLUMN_GAP * (self.columns - 1)) / self.columns
        cells = {name: self._cells(name) for name in self.numbers}
        table = [_LEGEND, *cells.values()]
        needs = [1 + max(text_width(row[column], 11) for row in table) for column in range(len(_LEGEND))]
        room = width - 30 - sum(needs) - (len(needs) - 1) * _CELL_GAP
        needs[0] = max(needs[0] + min(room, 0), width / 5)  # long names are shortened
        for column in range(self.columns):
            x = _MARGIN + column * (width + _COLUMN_GAP)
            yield from _line(x + 30, top + 23, width - 30, _LEGEND, needs)
        for name, number in self.numbers.items():
            column, line = divmod(number - 1, self.lines)
            x, y = _MARGIN + column * (width + _COLUMN_GAP), top + 12 + (line + 1) * _LEGEND_ROW
            yield _rect(x, y, 22, 14, self.colours[name])
            yield _text(x + 11, y + 11, str(number), size=10, anchor="middle")
            yield from _line(x + 30, y + 11, width - 30, cells[name], needs, _INK)
        y = top + 16 + (self.lines + 1) * _LEGEND_ROW
        yield _rect(_MARGIN, y, 22, 14, "url(#padding)", stroke=_LINE)
        note = "padding. White ticks are cut points, thinned out where they would run together."
        yield _text(_MARGIN + 30, y + 11, note, fill=_MUTED)
        if self.widened:
            which = ", ".join(self.widened)
            note = f"{which}: drawn wider than to scale with S0, so as to be visible; to scale in itself."
            yield _text(_MARGIN + 30, y + 31, note, fill=_MUTED)

    def _cells(self, name: str) -> tuple[str, ...]:
        """A tensor's row in the legend; the headers are `_LEGEND`."""
        spec = self.specs[name]
        index, offset = self.positions[name]
        size = self.segments[index].shard_size
        stride, periods = self._stride(name, self.widths[index] / size)
        tick = ("period" if periods else "block") + ("s" if stride > 1 else "")
        tick = f"{stride:,} {tick}" if stride < spec.grid.num_blocks else "-"
        first, last = offset // size, (offset + spec.numel - 1) // size
        ranks = str(first) if first == last else f"{first}-{last}"
        return name, " × ".join(str(size) for size in spec.shape) or "scalar", str(spec.block), tick, ranks


def _line(
    x: float, y: float, width: float, cells: tuple[str, ...], needs: list[float], first: str = _MUTED
) -> Iterator[str]:
    """A line of the legend: cells in columns as wide as `needs`, the first in the colour `first`."""
    start, end = x, x + width
    for cell, need in zip(cells, needs, strict=True):
        yield _text(start, y, fitting(cell, min(need, end - start), 11), fill=first if start == x else _MUTED)
        start += need + _CELL_GAP


def _segment_widths(segments: Sequence[Segment]) -> list[float]:
    """Widths to scale; a segment too thin to be readable gets a minimum width, and the rest shrink for it."""
    count = len(segments)
    free = _WIDTH - 2 * _MARGIN - _GUTTER - _SEGMENT_GAP * (count - 1.0)
    least = min(_LEAST_SEGMENT, free / max(count, 1))
    rest = sum(segment.shard_size for segment in segments)
    widths = [0.0] * count
    for index in sorted(range(count), key=lambda index: segments[index].shard_size):
        size = segments[index].shard_size
        widths[index] = max(least, free * size / rest)
        free, rest = free - widths[index], rest - size
    return widths


def colours(count: int) -> list[str]:
    """`count` distinct colours: the palette first, then the palette again in darker and darker shades."""
    lines = []
    for index in range(count):
        turn, place = divmod(index, len(_PALETTE))
        channels = (int(_PALETTE[place][at : at + 2], 16) for at in (1, 3, 5))
        lines.append("#" + "".join(f"{round(96 + (channel - 96) * 0.82**turn):02x}" for channel in channels))
    return lines


def text_width(content: str, size: float) -> float:
    """An upper estimate of the width in px, whichever sans-serif font the viewer has (DejaVu is the widest)."""
    ems = 0.0
    for letter in content:
        if letter in _NARROW:
            ems += 0.42
        elif letter in _WIDE:
            ems += 1.0
        else:
            ems += 0.72 if letter.isupper() else 0.65
        if ord(letter) > 0x2E7F:  # CJK and emoji are square
            ems += 0.5
    return ems * size


def fitting(content: str, width: float, size: float) -> str:
    """The content, with its middle replaced by an ellipsis if it is too wide."""
    shown, keep = content, len(content)
    while keep > 1 and text_width(shown, size) > width:
        keep -= 1
        shown = content[: keep - keep // 2] + "…" + (content[-(keep // 2) :] if keep > 1 else "")
    return shown


def _shortened(name: str) -> Iterator[str]:
    """A parameter's name, then shorter forms of it: without `.weight`, without its leading components."""
    yield name
    parts = name.removesuffix(".weight").split(".")
    for start in range(len(parts)):
        yield ".".join(parts[start:])


def _rect(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "") -> str:
    more = f' stroke="{stroke}"' if stroke else ""
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}"{more}/>'


def _text(
    x: float,
    y: float,
    content: str,
    *,
    size: int = 11,
    fill: str = _INK,
    weight: str = "",
    anchor: str = "",
    opacity: str = "",
) -> str:
    """One line of text, escaped; `y` is its baseline."""
    attributes = {"font-weight": weight, "text-anchor": anchor, "opacity": opacity}
    more = "".join(f' {key}="{value}"' for key, value in attributes.items() if value)
    return f'<text x="{x:.2f}" y="{y:g}" font-size="{size}" fill="{fill}"{more}>{escape(content)}</text>'

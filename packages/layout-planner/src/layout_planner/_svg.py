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
from layout_planner._svg_text import (
    FAINT,
    INK,
    LINE,
    MUTED,
    colours,
    fitting,
    number,
    rect,
    shortened,
    text,
    text_width,
)

_WIDTH, _MARGIN, _GUTTER = 1280, 28, 64
_ROW, _ROW_GAP = 24, 6
_SEGMENT_GAP, _LEAST_SEGMENT = 16, 96
_TICK, _TICK_LENGTH = 4, 5  # px between ticks at least, px of each tick
_LEAST_TENSOR = 0.8  # px; anything less would be invisible
_LEGEND_ROW, _CELL_GAP, _COLUMN_GAP = 20, 11, 20
_LEGEND = ("tensor", "shape", "block", "a tick is", "on ranks")
_DEFAULT_RANKS = 16


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
        body.append(text(_MARGIN, y, fitting(title, _WIDTH - 2 * _MARGIN, 18), size=18, weight="bold"))
        y += 16
    body += picture.figures(y, figures)
    y += 58
    body += picture.rows(y)
    y += picture.rows_height + 12
    body += picture.legend(y)
    height = y + picture.legend_height + _MARGIN
    return "\n".join([*_frame(height, title or "layout"), *body, "</svg>", ""])


def _frame(height: float, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH} {height:g}" font-family="sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>'
        '<rect width="1.6" height="6" fill="#b9c0c8"/></pattern></defs>',
        rect(0, 0, _WIDTH, height, "#ffffff", radius=8),
    ]


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
        order = list(self.positions)
        self.numbers = {name: place for place, name in enumerate(order, 1)}
        by_size = sorted(order, key=lambda name: (-specs[name].numel, self.numbers[name]))
        self.colours = dict(zip(by_size, colours(len(by_size)), strict=True))
        self.widths = _segment_widths(segments)
        self.widened = [
            index
            for index, segment in enumerate(segments)
            if self.widths[index] * segments[0].shard_size > 1.001 * self.widths[0] * segment.shard_size
        ]
        self.rows_height = 24 + len(ranks) * (_ROW + _ROW_GAP) + 20 if order else 36
        self.columns = 1 if len(order) <= 6 else 2
        lines = -(-len(order) // self.columns)
        self.legend_height = 32 + (lines + 1) * _LEGEND_ROW + (20 if self.widened else 0)

    def figures(self, top: float, figures: Sequence[tuple[str, str]]) -> list[str]:
        """A strip of labelled figures."""
        drawn = ("ranks drawn", f"{len(self.ranks)} of {number(self.world_size)}")
        step = (_WIDTH - 2 * _MARGIN) / (len(figures) + 1)
        parts = []
        for place, (label, value) in enumerate([*figures, drawn]):
            x = _MARGIN + place * step
            parts.append(text(x, top + 12, label, size=11, fill=MUTED))
            parts.append(text(x, top + 32, fitting(value, step - 8, 16), size=16, weight="bold"))
        return parts

    def rows(self, top: float) -> list[str]:
        """One row per rank, the segments side by side, and above them their shard sizes."""
        if not self.segments:
            return [text(_MARGIN, top + 14, "This group has no tensors.", size=12, fill=MUTED)]
        parts = []
        x: float = _MARGIN + _GUTTER
        for index, segment in enumerate(self.segments):
            width = self.widths[index]
            sign = f"S{index}" if len(self.segments) > 1 else "S"
            label = f"{sign} = {number(segment.shard_size)}"
            if text_width(label, 12) <= width:
                parts.append(text(x, top + 12, label, size=12, weight="bold"))
            for place, rank in enumerate(self.ranks):
                parts += self._shard(segment, rank, x, top + 24 + place * (_ROW + _ROW_GAP), width)
            x += width + _SEGMENT_GAP
        for place, rank in enumerate(self.ranks):
            y = top + 24 + place * (_ROW + _ROW_GAP) + _ROW / 2 + 4
            parts.append(text(_MARGIN + _GUTTER - 10, y, f"rank {rank}", size=11, fill=MUTED, anchor="end"))
        bottom = top + self.rows_height - 8
        left = self.world_size - len(self.ranks)
        if left:
            note = f"{number(left)} more {'rank' if left == 1 else 'ranks'} not drawn"
            parts.append(text(_MARGIN + _GUTTER, bottom, note, size=11, fill=MUTED))
        return parts + self._scale_bar(bottom)

    def _scale_bar(self, y: float) -> list[str]:
        scale = self.widths[0] / self.segments[0].shard_size
        elements = _round_down(140 / scale)
        length = elements * scale
        right = _WIDTH - _MARGIN
        label = f"{number(elements)} {'element' if elements == 1 else 'elements'}"
        bar = f"M{right - length:.2f} {y - 8}v8M{right - length:.2f} {y - 4}H{right}M{right} {y - 8}v8"
        return [
            f'<path d="{bar}" stroke="{MUTED}" fill="none"/>',
            text(right - length - 8, y, label, size=11, fill=MUTED, anchor="end"),
        ]

    def _shard(self, segment: Segment, rank: int, x: float, y: float, width: float) -> list[str]:
        """One rank's shard of one segment: the padding pattern, with tensors drawn over it."""
        size = segment.shard_size
        scale = width / size
        parts = [rect(x, y, width, _ROW, "url(#padding)")]
        for name, offset in zip(segment.names, segment.offsets, strict=True):
            start, stop = segment.local_range(offset, self.specs[name].numel, rank)
            if start == stop:
                continue
            left = x + (offset + start - rank * size) * scale
            wide = max((stop - start) * scale, _LEAST_TENSOR)
            left = min(left, x + width - wide)
            hover = escape(f"{name}, rank {rank}: elements {start} to {stop}")
            parts.append(f"<g><title>{hover}</title>")
            parts.append(rect(left, y, wide, _ROW, self.colours[name]))
            parts += self._ticks(name, start, stop, left, y, scale)
            parts += self._label(name, left, y, wide, first=start == 0)
            parts.append("</g>")
        parts.append(rect(x, y, width, _ROW, "none", stroke=LINE))
        return parts

    def _ticks(self, name: str, start: int, stop: int, left: float, y: float, scale: float) -> list[str]:
        """Cut points inside the elements [start, stop) of the tensor, as one path of short lines."""
        places = [left + (cut - start) * scale for cut in self._cuts(name, start, stop, scale)]
        if not places:
            return []
        gap = _ROW - 2 * _TICK_LENGTH  # for the name
        path = "".join(f"M{place:.2f} {y:g}v{_TICK_LENGTH}m0 {gap}v{_TICK_LENGTH}" for place in places)
        return [f'<path d="{path}" stroke="#ffffff"/>']

    def _cuts(self, name: str, start: int, stop: int, scale: float) -> Iterator[int]:
        grid = self.specs[name].grid
        stride, whole_periods = self.stride(name, scale)
        if whole_periods or grid.uniform:
            step = stride * (grid.period if whole_periods else grid.block)
            yield from range((start // step + 1) * step, stop, step)
            return
        step = stride * grid.block
        for begin in range(start - start % grid.period, stop, grid.period):
            yield from (cut for cut in range(begin, begin + grid.period, step) if start < cut < stop)

    def stride(self, name: str, scale: float) -> tuple[int, bool]:
        """Blocks per tick; or periods per tick, and True, where ticks at blocks would be too dense."""
        grid = self.specs[name].grid
        blocks = _round_up(_TICK / (grid.block * scale))
        if not grid.uniform and blocks * grid.block > grid.period / 2:
            return _round_up(_TICK / (grid.period * scale)), True
        return blocks, False

    def _label(self, name: str, left: float, y: float, wide: float, *, first: bool) -> list[str]:
        """The tensor's name shortened to fit, or its number in the legend, or nothing."""
        for label in (*shortened(name), str(self.numbers[name])):
            space = text_width(label, 11) + 10
            if space <= wide:
                opacity = "1" if first else "0.7"
                place = left + wide / 2
                return [text(place, y + _ROW / 2 + 4, label, size=11, anchor="middle", opacity=opacity)]
        return []

    def legend(self, top: float) -> list[str]:
        """All tensors with number, colour, name, shape, block and ranks; then the meaning of ticks and hatching."""
        parts = [f'<path d="M{_MARGIN} {top}H{_WIDTH - _MARGIN}" stroke="{FAINT}"/>']
        width = (_WIDTH - 2 * _MARGIN - _COLUMN_GAP * (self.columns - 1)) / self.columns
        cells = {name: self._cells(name) for name in self.numbers}
        table = [_LEGEND, *cells.values()]
        needs = [1 + max(text_width(row[column], 11) for row in table) for column in range(len(_LEGEND))]
        room = width - 30 - sum(needs) - (len(needs) - 1) * _CELL_GAP
        needs[0] = max(needs[0] + min(room, 0), width / 5)  # long names are shortened
        for column in range(self.columns):
            x = _MARGIN + column * (width + _COLUMN_GAP)
            parts += _line(x + 30, top + 23, width - 30, _LEGEND, needs)
        lines = -(-len(self.numbers) // self.columns)
        for name, place in self.numbers.items():
            column, line = divmod(place - 1, lines)
            x, y = _MARGIN + column * (width + _COLUMN_GAP), top + 12 + (line + 1) * _LEGEND_ROW
            parts.append(rect(x, y, 22, 14, self.colours[name]))
            parts.append(text(x + 11, y + 11, str(place), size=10, anchor="middle"))
            parts += _line(x + 30, y + 11, width - 30, cells[name], needs, INK)
        y = top + 16 + (lines + 1) * _LEGEND_ROW
        parts.append(rect(_MARGIN, y, 22, 14, "url(#padding)", stroke=LINE))
        note = "padding. White ticks are cut points, thinned out where they would run together."
        parts.append(text(_MARGIN + 30, y + 11, note, size=11, fill=MUTED))
        if self.widened:
            which = ", ".join(f"S{index}" for index in self.widened)
            note = f"{which}: drawn wider than to scale with S0, so as to be visible; to scale in itself."
            parts.append(text(_MARGIN + 30, y + 31, note, size=11, fill=MUTED))
        return parts

    def _cells(self, name: str) -> tuple[str, ...]:
        """A tensor's row in the legend; the headers are `_LEGEND`."""
        spec = self.specs[name]
        index, offset = self.positions[name]
        size = self.segments[index].shard_size
        stride, periods = self.stride(name, self.widths[index] / size)
        tick = ("period" if periods else "block") + ("s" if stride > 1 else "")
        tick = f"{number(stride)} {tick}" if stride < spec.grid.num_blocks else "-"
        first, last = offset // size, (offset + spec.numel - 1) // size
        ranks = str(first) if first == last else f"{first}-{last}"
        return name, " × ".join(str(size) for size in spec.shape) or "scalar", str(spec.block), tick, ranks


def _line(
    x: float, y: float, width: float, cells: tuple[str, ...], needs: list[float], first: str = MUTED
) -> Iterator[str]:
    """A line of the legend: cells in columns as wide as `needs`, the first in the colour `first`."""
    start, end = x, x + width
    for cell, need in zip(cells, needs, strict=True):
        fill = first if start == x else MUTED
        yield text(start, y, fitting(cell, min(need, end - start), 11), size=11, fill=fill)
        start += need + _CELL_GAP


def _segment_widths(segments: Sequence[Segment]) -> list[float]:
    """Widths to scale; a segment too thin to be readable gets a minimum width, and the rest shrink for it."""
    count = len(segments)
    if not count:
        return []
    space = _WIDTH - 2 * _MARGIN - _GUTTER - _SEGMENT_GAP * (count - 1)
    least = min(float(_LEAST_SEGMENT), space / count)
    widths = [0.0] * count
    thin: set[int] = set()
    while True:
        rest = sum(segment.shard_size for index, segment in enumerate(segments) if index not in thin)
        free = space - least * len(thin)
        for index, segment in enumerate(segments):
            widths[index] = least if index in thin else free * segment.shard_size / rest
        narrow = {index for index, width in enumerate(widths) if width < least} - thin
        if not narrow:
            return widths
        thin |= narrow


def _round_up(value: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    base = 1
    while True:
        for digit in (1, 2, 5):
            if digit * base >= value:
                return digit * base
        base *= 10


def _round_down(value: float) -> int:
    """The last of 1, 2, 5, 10, 20, 50, ... up to the value, but at least 1."""
    step, base = 1, 1
    while base <= value:
        step = max(digit * base for digit in (1, 2, 5) if digit * base <= value)
        base *= 10
    return step

"""A picture of a layout, to scale.

    title
    figures: elements, padded, padding, lower bound, gap, ranks
             S0 = 3,133,440                     S1 = 5,760
    rank 0  [ q_proj |||||| k_proj |||/////]  [ o_proj ||//]      one row per rank, one column per segment
    rank 1  [ ...                          ]  [            ]
    legend: colour and number, name, shape, block, ranks

Ticks are cut points, drawn where they are far enough apart to be seen. Equal layouts give equal text.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from layout_planner._spec import Segment, TensorSpec

_WIDTH, _MARGIN, _GUTTER = 1280, 28, 64
_ROW, _ROW_GAP, _LEGEND_ROW = 24, 6, 20
_SEGMENT_GAP, _LEAST_SEGMENT = 16, 96
_TICK, _TICK_LENGTH = 4, 5  # px between ticks at least, px of each tick
_LEAST_TENSOR = 0.8  # px; anything less would be invisible
_DEFAULT_RANKS = 16

_INK, _MUTED, _LINE = "#1b1f24", "#57606a", "#8c959f"
# Light enough for dark text on them; neighbours in this list are far apart in hue.
_PALETTE = (
    "#8ab6f0", "#f5b971", "#8fd19e", "#e79aa8", "#b9a5e8", "#f2dd78", "#7fcfd0", "#d9b38c",
    "#b5d46c", "#efa3d6", "#9fb4c7", "#f09f7d", "#6fc3a7", "#c9a0c9", "#dcc46a", "#93a7ee",
)  # fmt: skip


def draw(
    segments: Sequence[Segment],
    specs: Mapping[str, TensorSpec],
    world_size: int,
    figures: Sequence[tuple[str, str]],
    *,
    title: str = "",
    ranks: range | None = None,
) -> str:
    """A layout of tensors, by name, as an SVG document.

    Prints figures, labels and values, above the picture. Draws one row for each of `ranks`, by default the first 16;
    raises ValueError if there are none or they reach outside the world size.
    """
    if ranks is None:
        ranks = range(min(world_size, _DEFAULT_RANKS))
    if not ranks or min(ranks) < 0 or max(ranks) >= world_size:
        raise ValueError(
            f"cannot draw ranks {ranks}: expected one or more of the {world_size} ranks 0..{world_size - 1}"
        )
    picture = _Picture(segments, specs, world_size, ranks)
    rows_top = _MARGIN + 34 + 58
    legend_top = rows_top + 36 + len(ranks) * (_ROW + _ROW_GAP) + 12
    height = legend_top + _LEGEND_ROW * (len(picture.numbers) + 2) + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {_WIDTH} {height:g}" font-family="sans-serif" role="img">',
            f"<title>{escape(title or 'layout')}</title>",
            '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>'
            '<rect width="1.6" height="6" fill="#b9c0c8"/></pattern></defs>',
            _rect(0, 0, _WIDTH, height, "#ffffff"),
            *([_text(_MARGIN, _MARGIN + 18, title, size=18)] if title else []),
            *picture.figures(_MARGIN + 34, figures),
            *picture.rows(rows_top),
            *picture.legend(legend_top),
            "</svg>",
            "",
        ]
    )


class _Picture:
    """One drawing: its figures, rows and legend."""

    def __init__(
        self, segments: Sequence[Segment], specs: Mapping[str, TensorSpec], world_size: int, ranks: range
    ) -> None:
        self.segments, self.specs = segments, specs
        self.world_size, self.ranks = world_size, ranks
        self.positions = {
            name: (segment.shard_size, offset)
            for segment in segments
            for name, offset in zip(segment.names, segment.offsets, strict=True)
        }
        self.numbers = {name: place for place, name in enumerate(self.positions, 1)}
        by_size = sorted(self.numbers, key=lambda name: (-specs[name].numel, self.numbers[name]))
        self.colours = {name: _PALETTE[place % len(_PALETTE)] for place, name in enumerate(by_size)}

    def figures(self, top: float, figures: Sequence[tuple[str, str]]) -> Iterator[str]:
        """A strip of labelled figures."""
        drawn = ("ranks drawn", f"{len(self.ranks)} of {self.world_size:,}")
        step = (_WIDTH - 2 * _MARGIN) / (len(figures) + 1)
        for place, (label, value) in enumerate([*figures, drawn]):
            x = _MARGIN + place * step
            yield _text(x, top + 12, label, fill=_MUTED)
            yield _text(x, top + 32, value, size=16)

    def rows(self, top: float) -> Iterator[str]:
        """One row per rank, the segments side by side, and above them their shard sizes."""
        tops = [top + 24 + place * (_ROW + _ROW_GAP) for place in range(len(self.ranks))]
        x: float = _MARGIN + _GUTTER
        widths = _segment_widths(self.segments)
        for index, (segment, width) in enumerate(zip(self.segments, widths, strict=True)):
            label = f"S{index if len(self.segments) > 1 else ''} = {segment.shard_size:,}"
            if text_width(label, 11) <= width:
                yield _text(x, top + 12, label)
            for rank, y in zip(self.ranks, tops, strict=True):
                yield from self._shard(segment, rank, x, y, width)
            x += width + _SEGMENT_GAP
        for rank, y in zip(self.ranks, tops, strict=True):
            yield _text(_MARGIN + _GUTTER - 10, y + _ROW / 2 + 4, f"rank {rank}", fill=_MUTED, anchor="end")
        left = self.world_size - len(self.ranks)
        if left:
            note = f"{left:,} more {'rank' if left == 1 else 'ranks'} not drawn"
            yield _text(_MARGIN + _GUTTER, tops[-1] + _ROW + 16, note, fill=_MUTED)

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
            labels = (name, str(self.numbers[name]))
            label = next((label for label in labels if text_width(label, 11) + 10 <= wide), None)
            if label is not None:
                yield _text(left + wide / 2, y + _ROW / 2 + 4, label, anchor="middle")
            yield "</g>"
        yield _rect(x, y, width, _ROW, "none", stroke=_LINE)

    def _cuts(self, name: str, start: int, stop: int, scale: float) -> Iterator[int]:
        """Cut points inside the elements [start, stop) of the tensor; none where they would run together."""
        grid = self.specs[name].grid
        if grid.block * scale < _TICK:
            return
        for begin in range(start - start % grid.period, stop, grid.period):
            cuts = range(begin, min(begin + grid.period, stop), grid.block)
            yield from (cut for cut in cuts if start < cut)

    def legend(self, top: float) -> Iterator[str]:
        """All tensors with colour, number, name, shape, block and ranks; then the meaning of ticks and hatching."""
        for name, number in self.numbers.items():
            y = top + number * _LEGEND_ROW
            yield _rect(_MARGIN, y, 22, 14, self.colours[name])
            yield _text(_MARGIN + 11, y + 11, str(number), anchor="middle")
            spec, (size, offset) = self.specs[name], self.positions[name]
            shape = " × ".join(map(str, spec.shape)) or "scalar"
            first, last = offset // size, (offset + spec.numel - 1) // size
            ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
            x = _MARGIN + 30
            yield _text(x, y + 11, f"{shape}, {spec.block}, {ranks}", fill=_MUTED)
            yield _text(x + 320, y + 11, name)  # last: a long one is cut off at the picture's edge
        y = top + (len(self.numbers) + 1) * _LEGEND_ROW
        yield _rect(_MARGIN, y, 22, 14, "url(#padding)", stroke=_LINE)
        note = (
            "padding. White ticks are cut points, where they are far enough apart. Each segment is to scale; "
            f"one that would be narrower than {_LEAST_SEGMENT} px beside the others is drawn that wide."
        )
        yield _text(_MARGIN + 30, y + 11, note, fill=_MUTED)


def _segment_widths(segments: Sequence[Segment]) -> list[float]:
    """Widths to scale; a segment too thin to be readable gets a minimum width, and the rest shrink for it."""
    count = len(segments)
    free = _WIDTH - 2 * _MARGIN - _GUTTER - _SEGMENT_GAP * (count - 1.0)
    least = min(_LEAST_SEGMENT, free / count)
    rest = sum(segment.shard_size for segment in segments)
    widths = [0.0] * count
    for index in sorted(range(count), key=lambda index: segments[index].shard_size):
        size = segments[index].shard_size
        widths[index] = max(least, free * size / rest)
        free, rest = free - widths[index], rest - size
    return widths


def text_width(content: str, size: float) -> float:
    """An estimate of the width in px that text of a sans-serif font seldom exceeds."""
    return 0.7 * size * len(content)


def _rect(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "") -> str:
    more = f' stroke="{stroke}"' if stroke else ""
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}"{more}/>'


def _text(
    x: float, y: float, content: str, *, size: int = 11, fill: str = _INK, anchor: str = "start"
) -> str:
    """One line of text, escaped; `y` is its baseline."""
    place = f'x="{x:.2f}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}">{escape(content)}</text>'

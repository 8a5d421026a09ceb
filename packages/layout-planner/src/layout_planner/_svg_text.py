"""The elements of a drawing: rectangles, text that fits, colours."""

from collections.abc import Iterator
from html import escape

INK, MUTED, FAINT, LINE = "#1b1f24", "#57606a", "#d8dee4", "#8c959f"

# Light enough for dark text on them; neighbours in this list are far apart in hue.
_PALETTE = (
    "#8ab6f0", "#f5b971", "#8fd19e", "#e79aa8", "#b9a5e8", "#f2dd78", "#7fcfd0", "#d9b38c",
    "#b5d46c", "#efa3d6", "#9fb4c7", "#f09f7d", "#6fc3a7", "#c9a0c9", "#dcc46a", "#93a7ee",
)  # fmt: skip

_NARROW, _WIDE = frozenset("fijlrt.,:;'|!()[]{} "), frozenset("mwMW@%")


def colours(count: int) -> list[str]:
    """`count` distinct colours: the palette first, then the palette again in darker and darker shades."""
    lines = []
    for index in range(count):
        turn, place = divmod(index, len(_PALETTE))
        keep = 0.82**turn
        channels = (int(_PALETTE[place][at : at + 2], 16) for at in (1, 3, 5))
        lines.append("#" + "".join(f"{round(96 + (channel - 96) * keep):02x}" for channel in channels))
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
    if text_width(content, size) <= width:
        return content
    keep = len(content)
    while keep > 1 and text_width(content[: keep - keep // 2] + "…" + content[-(keep // 2) :], size) > width:
        keep -= 1
    return content[: keep - keep // 2] + "…" + (content[-(keep // 2) :] if keep > 1 else "")


def shortened(name: str) -> Iterator[str]:
    """A parameter's name, then shorter forms of it: without `.weight`, without its leading components."""
    yield name
    stem = name.removesuffix(".weight")
    if stem != name:
        yield stem
    parts = stem.split(".")
    for start in range(1, len(parts)):
        yield ".".join(parts[start:])


def number(value: int) -> str:
    """The number with thousands separators."""
    return f"{value:,}"


def rect(
    x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "", radius: float = 0
) -> str:
    """A rectangle; all lengths in px."""
    more = f' stroke="{stroke}"' if stroke else ""
    more += f' rx="{radius:g}"' if radius else ""
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}"{more}/>'


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: int,
    fill: str = INK,
    weight: str = "",
    anchor: str = "",
    opacity: str = "",
) -> str:
    """One line of text, escaped; `y` is its baseline."""
    more = "".join(
        f' {key}="{value}"'
        for key, value in (("font-weight", weight), ("text-anchor", anchor), ("opacity", opacity))
        if value and value != "1"
    )
    return f'<text x="{x:.2f}" y="{y:g}" font-size="{size}" fill="{fill}"{more}>{escape(content)}</text>'

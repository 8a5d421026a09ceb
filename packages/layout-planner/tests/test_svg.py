"""A drawing is well-formed, to scale, complete, and its text stays where it belongs."""

import re
from xml.etree import ElementTree

import pytest

from layout_planner import Layout, Rows, Segment, TensorSpec, Tile, Whole, plan

SVG = "{http://www.w3.org/2000/svg}"
SMALL = Layout(
    (TensorSpec("a", (6, 8), Rows(2)), TensorSpec("b", (5, 8)), TensorSpec("c", (16,), Whole())),
    2,
    8,
    (Segment(48, ("a", "b"), (0, 48)), Segment(16, ("c",), (16,))),
)


def parse(picture):
    return ElementTree.fromstring(picture)


def texts(picture):
    return [element.text for element in parse(picture).iter(f"{SVG}text")]


def bars(picture):
    """(hover text, rectangle, path of ticks or None) of every tensor on every rank."""
    return [
        (group.find(f"{SVG}title").text, group.find(f"{SVG}rect").attrib, group.find(f"{SVG}path"))
        for group in parse(picture).iter(f"{SVG}g")
    ]


def test_a_bar_to_scale_is_drawn_for_each_tensor_on_each_rank_that_holds_some_of_it():
    drawn = bars(SMALL.to_svg())
    assert [hover for hover, _, _ in drawn] == [
        "a, rank 0: elements 0 to 48",
        "b, rank 1: elements 0 to 40",
        "c, rank 1: elements 0 to 16",
    ]
    a, b, c = (rect for _, rect, _ in drawn)
    assert float(b["width"]) / float(a["width"]) == pytest.approx(40 / 48, rel=1e-3)
    assert float(c["x"]) > float(b["x"])  # segments stand side by side


def test_a_tick_stands_at_every_block_cut_where_there_is_room():
    ticks = {hover[0]: path for hover, _, path in bars(SMALL.to_svg())}
    assert len(re.findall("M", ticks["a"].get("d"))) == 2
    assert len(re.findall("M", ticks["b"].get("d"))) == 4
    assert ticks["c"] is None


def test_ticks_follow_blocks_that_start_anew_in_each_matrix():
    spec = TensorSpec("stacked", (2, 5, 8), Tile(2, 8))
    ((_, rect, path),) = bars(plan([spec], 1).to_svg())
    scale = float(rect["width"]) / 80
    places = [round((float(x) - float(rect["x"])) / scale) for x in re.findall(r"M([\d.]+) ", path.get("d"))]
    assert places == [16, 32, 40, 56, 72]


def test_texts_name_ranks_and_shard_sizes_and_the_legend_gives_totals_and_the_bound():
    found = texts(SMALL.to_svg())
    assert {"rank 0", "rank 1", "2 of 2", "S0 = 48", "S1 = 16"} <= set(found)
    assert {"104", "128", "23.1 %", "elements", "with padding", "gap to the bound"} <= set(found)
    assert f"lower bound, by {SMALL.bound.reason}" in found


def test_only_the_ranks_asked_for_are_drawn_or_the_first_sixteen():
    layout = plan([TensorSpec("a", (64, 8))], 32)
    for ranks, drawn in ((range(20, 23), range(20, 23)), (None, range(16))):
        found = texts(layout.to_svg(ranks=ranks))
        assert [text for text in found if text.startswith("rank ")] == [f"rank {rank}" for rank in drawn]
        assert f"{32 - len(drawn)} more ranks not drawn" in found


def test_names_and_titles_are_escaped():
    layout = plan([TensorSpec('<b a="1">&', (8, 8))], 2)
    found = texts(layout.to_svg(title="a < b & c"))
    assert {'<b a="1">&', "a < b & c"} <= set(found)

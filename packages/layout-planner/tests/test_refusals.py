"""Every input that is refused: (call, error, words). Files are in test_checkpoints.py, commands in test_cli.py."""

import json
import math
from functools import partial
from typing import Any

import pytest

from layout_planner import BlockGrid, Elements, Layout, Rows, Segment, TensorSpec, Tile, parse_block, plan
from layout_planner.baselines import even_rows, in_given_order, lcm_rule
from layout_planner.models import load_model, separate_experts

W = [TensorSpec("w", (4,))]
RULES: tuple[Any, ...] = (even_rows, lcm_rule)
SMALL = [TensorSpec("a", (4, 8), Rows(2)), TensorSpec("b", (16,)), TensorSpec("c", (3, 5, 8), Rows(2))]


def read(change):
    """Read a layout back in which something was changed."""
    content = json.loads(plan(SMALL, 2).to_json())
    change(content)
    Layout.from_json(json.dumps(content))


def many_boundaries():
    content = json.loads(
        Layout((TensorSpec("a", (10**6, 10**6)),), 1 << 20, 8, (Segment(10**6, ("a",), (0,)),)).to_json()
    )
    content["segments"][0]["shard_size"] = 10**6 - 8
    Layout.from_json(json.dumps(content))


REFUSED: list[tuple[Any, type[Exception], str]] = [
    # -- tensors, blocks, plans
    (lambda: TensorSpec("w", (4, 0)), ValueError, r"^w: a size in shape \(4, 0\) is 0"),
    (lambda: TensorSpec("w", (4, -2)), ValueError, r"^w: a size in shape \(4, -2\) is -2"),
    (lambda: TensorSpec("w", (4, 2.0)), ValueError, r"^w: a size in .* is 2\.0"),  # type: ignore[arg-type]
    (lambda: TensorSpec("w", (8,), Tile(2, 2)), ValueError,
     r"^w: tile:2x2 does not apply to a tensor of shape \(8,\)"),
    (lambda: Rows(0), ValueError, "Rows: count is 0"),
    (lambda: Tile(4, -1), ValueError, "Tile: columns is -1"),
    (lambda: Elements(True), ValueError, "Elements: count is True"),
    (lambda: plan([], 2), ValueError, "the group has no tensors"),
    (lambda: plan([TensorSpec("w", (4,))], 0), ValueError, "world_size is 0"),
    (lambda: plan([TensorSpec("w", (4,))], 2, align=0), ValueError, "align is 0"),
    (lambda: plan([TensorSpec("w", (4,))], 2, max_segments=0), ValueError, "max_segments is 0"),
    (lambda: plan([TensorSpec("w", (4,)), TensorSpec("w", (5,))], 2), ValueError, "^w: two tensors"),
    (lambda: parse_block("rows:0"), ValueError, "rows:0.*write rows:N"),
    (lambda: parse_block("row:3"), ValueError, "row:3.*not a known kind"),
    (lambda: parse_block("tile:3"), ValueError, "tile:3.*write rows:N"),
    (lambda: parse_block("whole:3"), ValueError, "whole:3.*not a known kind"),
    (lambda: BlockGrid(10, 2, 3), ValueError, "a block grid of 10 elements cannot"),
    *((partial(plan, SMALL, size), ValueError, f"world_size is {size}; expected an integer of at most 1048576")
      for size in ((1 << 20) + 1, 10**9, 10**30)),
    *((partial(rule, W, size), ValueError, "world_size is .*; expected an integer of at least 1")
      for rule in RULES for size in (0, -1, 2.0, True)),
    (lambda: in_given_order([], 2), ValueError, "the group has no tensors"),
    (lambda: plan(W, 2).offset("b"), KeyError, "'b' is not in this layout"),
    (lambda: plan(W, 2).local_range("w", 2), ValueError, "rank 2 is outside the 2 ranks"),
    *((partial(plan(W, 2).to_svg, ranks=ranks), ValueError,
       r"cannot draw ranks .*: expected one or more of the 2 ranks 0\.\.1")
      for ranks in (range(0), range(-1, 2), range(1, 3))),
    # -- quantized plans
    # -- models
    (lambda: load_model("gpt-6"), ValueError, r"'gpt-6'.*llama-3-8b.*kimi-k2"),
    (lambda: load_model("llama-3-8b").group("tail"), ValueError,
     r"llama-3-8b has no group 'tail'; it has embed, layers\.0-31, head"),
    (lambda: separate_experts(load_model("llama-3-8b")), ValueError, "has no stacked experts"),
    (lambda: separate_experts(load_model("gpt-oss-20b")), ValueError, "stacked in its checkpoint too"),
    # -- layouts that are read
    *((partial(Layout.from_json, text), ValueError, "not a layout")
      for text in ("", "[]", "null", '{"format": 1}', "[" * 100_000, '{"format": ' + "[" * 100_000,
                   '{"format": ' + "9" * 100_000)),
    (partial(read, lambda c: c.update(format=99)), ValueError, "format is 99"),
    (partial(read, lambda c: c.pop("world_size")), ValueError, "world_size"),
    (partial(read, lambda c: c["segments"][0].update(shard_size=24)), ValueError,
     "starts inside a block|past 2 shards"),
    (partial(read, lambda c: c["segments"][0]["offsets"].__setitem__(1, 8)), ValueError, "or overlaps"),
    (partial(read, lambda c: c["segments"][0]["offsets"].__setitem__(1, 36)), ValueError, "not a multiple of 8"),
    (partial(read, lambda c: c["segments"][0].update(names=["a", "a", "c"])), ValueError, "the segments hold"),
    (partial(read, lambda c: c["tensors"][0].update(shape=[0])), ValueError, r"a size in shape \(0,\) is 0"),
    (partial(read, lambda c: c.update(align=-1)), ValueError, "align is -1"),
    (partial(read, lambda c: c.update(align=0)), ValueError, "align is 0"),
    (partial(read, lambda c: c.update(align=True)), ValueError, "align is True"),
    (partial(read, lambda c: c.update(world_size=math.inf)), ValueError, "world_size is inf"),
    (partial(read, lambda c: c.update(world_size=2.0)), ValueError, r"world_size is 2\.0"),
    (partial(read, lambda c: c.update(world_size=10**12)), ValueError,
     "world_size is 1000000000000; expected an integer of at most 1048576"),
    (partial(read, lambda c: c["segments"][0].update(shard_size=math.nan)), ValueError,
     "segment 0: shard_size is nan"),
    (partial(read, lambda c: c["segments"][0].update(shard_size="64")), ValueError, "segment 0: shard_size is '64'"),
    (partial(read, lambda c: c["segments"][0]["offsets"].__setitem__(0, 0.5)), ValueError, r"a: offset is 0\.5"),
    (partial(read, lambda c: c["segments"][0]["names"].__setitem__(0, ["a"])), ValueError, "not a layout"),
    (partial(read, lambda c: c["tensors"][0].update(name=3)), ValueError, "not a layout"),
    (partial(read, lambda c: c["tensors"][0].update(block=None)), ValueError, "not a layout"),
    (partial(read, lambda c: c["tensors"][0].update(shape=7)), ValueError, "not a layout"),
    (partial(read, lambda c: c.update(segments=[])), ValueError, "the segments hold"),
    (partial(read, lambda c: c.update(segments=None)), ValueError, "not a layout"),
    (many_boundaries, ValueError, "starts inside a block|past"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "words"), REFUSED, ids=[f"{n} {words[:40]}" for n, (*_, words) in enumerate(REFUSED)]
)
def test_bad_input_is_refused_with_the_name_the_value_and_the_way_out(call, error, words):
    with pytest.raises(error, match=words):
        call()

"""Every call that is refused: (call, error, words). In one process, and on every rank, well before a time-out."""

import re
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import SPECS, layout_for, load, make, mesh_of, quantized_tensor
from test_blocks_on_wire import FORMATS
from test_blocks_on_wire import layout_for as tiles_for
from test_wire import Quantized

from dbuffer import AllReduce, DBuffer, Encoder, Gather, ReduceScatter
from dbuffer.encodings import (
    BlockFP8,
    BlockInt8,
    BlockNF4,
    BlockReduction,
    BlocksAtRest,
    BlocksOnWire,
    CastReduction,
    Noise,
    RowRun,
)
from dbuffer.transport.peer.arena import Arena
from layout_planner import Elements, Layout, Rows, Segment, TensorSpec, Tile, plan
from ragged_shard.testing import run_ranks

Table = dict[str, tuple[Any, Any, str]]
STOCHASTIC, BF16 = BlockInt8(64, rounding="stochastic"), CastReduction()
REDUCED, TALL = BlockReduction(BlockInt8(64)), BlockFP8((4, 8))


def quantize(fmt=None, run=None, grid=None, **change):
    """Quantize the eight rows of a tensor, with other arguments."""
    grid = grid or BlockInt8().grid((8, 8))
    arguments: dict[str, Any] = {
        "values": torch.zeros(64), "codes": torch.zeros(64, dtype=torch.uint8), "scales": torch.zeros(8),
    }  # fmt: skip
    (fmt or BlockInt8()).quantize([RowRun(grid, *(run or (0, 8)))], **(arguments | change))


def add_up(fmt, runs=1):
    codes, scales, values = torch.zeros(64, dtype=torch.uint8), torch.zeros(8), torch.zeros(64)
    fmt.sum([RowRun(BlockInt8().grid((8, 8)), 0, 8)] * runs, codes, scales, values)


def arena_of_all():
    arena = Arena()
    arena.allocate(arena.size + 1)


BAD_FORMATS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (BlockFP8, {"tile": (0, 128)}), (BlockFP8, {"tile": (128,)}), (BlockFP8, {"tile": 128}),
    (BlockFP8, {"tile": (128, 128.0)}), (BlockFP8, {"scale": "e5m2"}), (BlockInt8, {"size": 0}),
    (BlockInt8, {"size": True}), (BlockInt8, {"rounding": "up"}), (BlockNF4, {"size": 63}),
)  # fmt: skip
ONE: Table = {
    **{f"{fmt.__name__} {options}": (partial(fmt, **options), ValueError, f"{fmt.__name__}: {next(iter(options))}")
       for fmt, options in BAD_FORMATS},
    **{f"buffer {number}": (partial(quantize, **change), ValueError, words)
       for number, (change, words) in enumerate((
           (dict[str, Any](codes=torch.zeros(64, dtype=torch.int8)), "codes: expected torch.uint8"),
           ({"scales": torch.zeros(1, dtype=torch.float64)}, "scales: expected torch.float32"),
           ({"values": torch.zeros(64, dtype=torch.int32)}, "values: expected"),
           ({"values": torch.zeros(8, 8)}, "values: expected one dimension"),
           ({"values": torch.zeros(128)[::2]}, "without gaps"),
           ({"codes": torch.zeros(63, dtype=torch.uint8)}, r"codes: rows \[0, 8\).*has 63 elements"),
           ({"noise": Noise(0, 0, 0)}, "takes no noise"), ({"run": (4, 9)}, r"rows \[4, 9\).*it has the rows \[0, 8\)"),
           ({"fmt": TALL, "grid": TALL.grid((8, 8)), "run": (0, 3)}, r"rows \[0, 3\).* cut tiles of \(4, 8\)"),
           ({"fmt": BlockInt8(64)}, "its tiles are"), ({"fmt": BlockInt8(256, "stochastic")}, "needs noise")))},
    "a sum of one dimension": (lambda: add_up(BlockInt8()), ValueError, "ranks"),
    "a sum of NF4": (lambda: add_up(BlockNF4(), 0), ValueError, "not reductions"),
    "weights rounded at random, at rest": (lambda: BlocksAtRest(STOCHASTIC), ValueError, "rounds stochastically"),
    "weights rounded at random": (lambda: BlocksOnWire(STOCHASTIC), ValueError, "stochastically; weights are rounded"),
    "a cast to fp16": (lambda: CastReduction(torch.float16), ValueError, "torch.bfloat16, torch.float32 or None"),
    "values of codes in fp64": (lambda: quantized_tensor(BlockNF4(64), torch.ones(6, 130)).double(), ValueError,
                                r"no values in torch\.float64"),
    "shared memory beyond the arena": (arena_of_all, RuntimeError, "have no free range"),
}  # fmt: skip


@pytest.mark.parametrize("row", ONE)
def test_a_call_that_makes_no_sense_is_refused_by_name(row):
    call, error, words = ONE[row]
    with pytest.raises(error, match=words):
        call()


# -- on every rank -----------------------------------------------------------------------------------------------------


def build(*layouts, shape=(), dtypes=(torch.float32,), **options):
    """A buffer from the layout, and the dtype, of this rank; the last one serves all further ranks."""
    rank, mesh = dist.get_rank(), mesh_of(*shape)
    if mesh.ndim == 2:
        options.setdefault("replicate_dim", 0)
    DBuffer(layouts[min(rank, len(layouts) - 1)], mesh, dtype=dtypes[min(rank, len(dtypes) - 1)], **options)


def construct(**change):
    arguments: dict[str, Any] = {"layout": layout_for(3), "mesh": mesh_of(), "dtype": torch.float32, **change}
    DBuffer(arguments.pop("layout"), arguments.pop("mesh"), **arguments)


def changed(**change):
    return plan([TensorSpec(s.name, *change.get(s.name, (s.shape, s.block))) for s in SPECS], 3)


def two(offset=8, size=16, segments=1):
    """Two tensors of four elements, in one segment or two."""
    specs = (TensorSpec("a", (4,)), TensorSpec("b", (4,)))
    if segments == 2:
        return Layout(specs, 3, 4, (Segment(size, ("a",), (0,)), Segment(size, ("b",), (offset,))))
    return Layout(specs, 3, 4, (Segment(size, ("a", "b"), (0, offset)),))


def full(**options):
    buffer = make(**options)
    buffer.materialize()
    return buffer


def of(*spec, **options):
    """A buffer of one tensor."""
    return DBuffer(
        plan([TensorSpec("w", *spec)], dist.get_world_size(), align=16),
        mesh_of(),
        dtype=torch.float32,
        **options,
    )


def at_rest():
    buffer = of((75, 130), Rows(1), full_dtype=torch.bfloat16, wire=BlocksAtRest(BlockNF4(64)))
    return load(buffer, {"w": torch.ones(75, 130)})


def write(change):
    """Change codes at rest: they stay as they are."""
    local = at_rest().local_views["w"]
    before = local.codes.clone()
    try:
        change(local)
    finally:
        assert local.codes.equal(before)


def of_cut_tiles(**options):
    layout = tiles_for(FORMATS[0], 3, "rows")
    arguments: Any = {"dtype": torch.float32, "check_ranks": False, **options}
    return DBuffer(layout, mesh_of(), **arguments)


class Elsewhere(Quantized):
    """A wire form that keeps gathered tensors in other memory."""

    def encoder(self, geometry, gathered, recycler):
        gathered.hold_nothing()
        return Encoder()


def shrunk_and_whole():
    one, other = make(), make()
    for buffer in (one, other):
        Gather([buffer]).start().wait()
    one.shrink(dist.group.WORLD)
    Gather([one, other]).start()


def by_variable(value):
    with mock.patch.dict("os.environ", DBUFFER_TRANSPORT=value):
        Gather([make()]).start()


AT_REST = r"kept as codes of BlockNF4\(size=64\)"
OTHER_RANKS = "planned for 2 ranks, mesh axis 0 has 3; plan with world_size=3"
ALIGNED = plan([TensorSpec("a", (12,)), TensorSpec("b", (12,))], 3, align=4)
ON_3: Table = {
    "a layout for 2 ranks": (lambda: build(layout_for(2)), ValueError, OTHER_RANKS),
    "on one rank": (lambda: build(layout_for(3), layout_for(2), layout_for(3)), ValueError, OTHER_RANKS),
    **{f"layouts differ {number}": (partial(build, layout_for(3), other), ValueError, words)
       for number, (other, words) in enumerate((
           (changed(weight=((14, 6), Rows(1))), r"tensor weight is \((13|14), 6\) in blocks"),
           (changed(tiled=((16, 8), Tile(8, 8))), "tensor tiled is .* in blocks tile:"),
           (plan(SPECS[1:], 3), "tensor weight is only (here|there)"), (plan(SPECS, 3, align=16), "align is"),
           (plan(SPECS[::-1], 3), "(the order of tensors|at element)")))},
    **{f"places differ {number}": (partial(build, two(), other), ValueError, words)
       for number, (other, words) in enumerate((
           (two(offset=12), "tensor b is at element (8|12) of segment 0 here, at element (8|12) of segment 0 there"),
           (two(segments=2), "tensor b is at element 8 of segment (0|1) here, at element 8 of segment (0|1) there"),
           (two(size=20), r"of a rank by segment is \[(16|20)\] here, \[(16|20)\] there")))},
    "dtypes differ": (lambda: build(layout_for(3), dtypes=(torch.float32, torch.bfloat16)), ValueError,
                      "dtype torch.(float32|bfloat16).* here, .* there"),
    "reductions differ": (lambda: make(reduction=BF16 if dist.get_rank() else None), ValueError,
                          r"the ranks do not agree: .*reduction"),
    **{f"alignment {number}": (partial(build, layout, **options), ValueError, words)
       for number, (layout, options, words) in enumerate((
           (ALIGNED, dict[str, Any](dtypes=(torch.bfloat16,)), r"(a|b) .* in torch.bfloat16; plan with align=8"),
           (ALIGNED, {"dtypes": (torch.uint8,)}, "in torch.uint8; plan with align=16"),
           (ALIGNED, {"full_dtype": torch.bfloat16}, "plan with align=8"),
           (two(offset=4), {"full_dtype": torch.bfloat16}, "b starts at byte 8, .* plan with align=8"),
           (two(size=20), {"full_dtype": torch.bfloat16}, "a rank's slice has 40 bytes, .* plan with align=8")))},
    "codes unaligned": (lambda: make(align=8, full_dtype=torch.bfloat16, wire=Quantized()), ValueError,
                        r"in torch\.int8; plan with align=16"),
    **{f"{change}": (partial(lambda change: construct(**change), change), error, words) for change, error, words in (
        ({"dtype": torch.complex64}, ValueError, "dtype torch.complex64: buffers hold real numbers"),
        ({"dtype": "float32"}, ValueError, "dtype float32"), ({"full_dtype": torch.bool}, ValueError, "torch.bool"),
        ({"device": "meta"}, ValueError, "device meta: expected cpu or the accelerator"),
        ({"shard_dim": "tp"}, ValueError, "shard_dim 'tp' is not among"),
        ({"shard_dim": 1}, ValueError, "shard_dim 1 is out of range"),
        ({"replicate_dim": 0}, ValueError, "name each axis once"),
        ({"mesh": "cpu"}, TypeError, "expected a torch DeviceMesh"),
        ({"layout": "weight"}, TypeError, "expected a layout_planner.Layout"),
        ({"shard_device": "cuda:7"}, ValueError, "shard_device cuda:7 is neither"))},
    "two axes": (lambda: construct(mesh=mesh_of(1, 3)), ValueError, "the mesh has 2 axes .* pass the sub-mesh"),
    # -- use
    "full": (lambda: make(name="layers.0").full, RuntimeError,
             "layers.0: full after release; gather it or call materialize first"),
    "views": (lambda: make(name="layers.0").views, RuntimeError, "layers.0: views after release"),
    "reduction": (lambda: ReduceScatter([make(name="layers.0")]).start(), RuntimeError,
                  "layers.0: reduce_scatter after release"),
    "all-reduce": (lambda: AllReduce([make(name="layers.0")]).start(), ValueError,
                   "layers.0: all_reduce needs a replicate axis"),
    "op": (lambda: ReduceScatter([full()], op="max"), ValueError, "op is 'max'"),  # type: ignore[arg-type]
    "avg": (lambda: ReduceScatter([full()], op="avg", divide=2.0).start(), ValueError, "divide=2.0 with op='avg'"),
    "divide": (lambda: ReduceScatter([full()], op="sum", divide=0.0).start(), ValueError, "divide=0.0"),
    "twice": (lambda: Gather([make()] * 2).start(), ValueError, "each once"),
    "none": (lambda: Gather([]).start(), ValueError, "at least one buffer"),
    "accumulate": (lambda: ReduceScatter([full(mesh=mesh_of(3, 1))]).start(accumulate=True), ValueError,
                   "build the buffer with alias=False"),
    "shrunk and whole": (shrunk_and_whole, ValueError, "only some were shrunk"),
    "sum of bytes": (lambda: ReduceScatter([full(full_dtype=torch.float8_e4m3fn, align=16)], op="sum").start(),
                     ValueError, "float8_e4m3fn cannot be added up; reduce in a wider full_dtype"),
    **{f"integers {options}": (partial(lambda options: ReduceScatter([full(dtype=torch.int32)], **options), options),
                               ValueError, "an average of torch.int32 is not torch.int32; use op='sum'")
       for options in ({"op": "avg"}, {"op": "sum", "divide": 2.0})},
    "pigeons": (lambda: by_variable("pigeons"), ValueError,
                "DBUFFER_TRANSPORT is 'pigeons'; expected one of auto, collectives"),
    # -- codes
    **{f"write {number}": (partial(write, change), RuntimeError, AT_REST) for number, change in enumerate((
        lambda t: t.add_(1), lambda t: t.zero_(), lambda t: t.normal_(), lambda t: torch._foreach_mul_([t], 2.0),
        lambda t: torch.add(t, 1, out=t)))},
    "reduction of codes": (lambda: ReduceScatter([at_rest()]).start(), ValueError, "does not apply to codes at rest"),
    "tiles cut at rest": (lambda: of((64, 64), Rows(1), wire=BlocksAtRest(BlockFP8((32, 32)))), ValueError,
                          r"w: rank \d holds the rows .* which cuts tiles of \(32, 32\)"),
    "fp64 at rest": (lambda: of((64, 64), full_dtype=torch.float64, wire=BlocksAtRest(BlockNF4(64))), ValueError,
                     r"torch\.float64 cannot be quantized"),
    "tiles cut": (lambda: of_cut_tiles(wire=BlocksOnWire(FORMATS[0])), ValueError, r"cuts tiles of \(16, 16\)"),
    "fp64": (lambda: of_cut_tiles(dtype=torch.float64, wire=BlocksOnWire(FORMATS[0])), ValueError,
             r"torch\.float64 cannot be quantized"),
    "full of a form": (lambda: full(wire=Elsewhere(), align=16).full, ValueError,
                       "full does not apply, since the wire form keeps gathered tensors elsewhere"),
    "slices of a form": (lambda: full(wire=Elsewhere(), align=16).shrink(dist.group.WORLD), ValueError,
                         "shrink does not apply, since the wire form keeps gathered tensors elsewhere"),
    "reduction of a form": (lambda: ReduceScatter([full(wire=Elsewhere(), align=16)]), ValueError,
                            "a reduction does not apply, since the wire form keeps gathered tensors elsewhere"),
    # -- reductions in a wire form
    "gradients in fp64": (lambda: of((8, 8), reduction=REDUCED, full_dtype=torch.float64), ValueError,
                          r"gradients in torch\.float64 cannot be quantized"),
    "fp16 as bf16": (lambda: make(full_dtype=torch.float16, reduction=BF16), ValueError,
                     r"gradients in torch\.float16 cannot travel as torch\.bfloat16"),
    "some with a form": (lambda: ReduceScatter([make(reduction=BF16), make()]), ValueError,
                         "only some have a reduction form"),
}  # fmt: skip
ON_4: Table = {
    "replicas differ": (lambda: build(layout_for(2), layout_for(2), layout_for(2), plan(SPECS[1:], 2), shape=(2, 2)),
                        ValueError, "tensor weight is only"),
    "rows cut": (lambda: ReduceScatter([of((10, 96), Elements(240), reduction=REDUCED)]), ValueError,
                 r"w: rank \d holds the elements .* which cuts rows of 96"),
}  # fmt: skip
RANKS = {3: ON_3, 4: ON_4}


def missed(number):
    """On a rank: the rows that are not refused, or in other words."""
    problems = []
    for name, (call, error, words) in RANKS[number].items():
        try:
            call()
        except Exception as raised:
            if not isinstance(raised, error) or not re.search(words, str(raised)):
                problems.append(f"{name}: {raised!r}")
        else:
            problems.append(f"{name}: not refused")
    return problems


@pytest.mark.parametrize("number", RANKS)
def test_every_rank_refuses(number):
    assert run_ranks(number, missed, number, timeout=120) == [[]] * number

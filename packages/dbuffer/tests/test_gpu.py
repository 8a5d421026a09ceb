"""What only a CUDA device can show: streams, overlap, the allocator. Ranks beyond the first are simulated."""

import json

import pytest
import torch
import torch.distributed as dist
from dbuffer_helpers import full_tensors, load, make, mesh_of, simulated_mesh
from test_collectives import accumulate, gather, reduce
from test_memory import test_one_rank_with_one_dtype_has_one_memory_unless_told_otherwise as alias
from test_memory import test_views_are_the_same_objects_and_valid_after_every_gather as views_survive
from test_memory import (
    test_what_autograd_saved_is_valid_again_after_release_and_gather as backward_after_release,
)

from dbuffer import DBuffer, Gather, Recycler
from dbuffer.encodings import BlockFP8, BlockInt8, BlockNF4, Noise, RowRun, RunList
from dbuffer.transport import transport_of
from layout_planner import TensorSpec, plan
from ragged_shard.device import device_layer
from ragged_shard.testing import on_ranks, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

RANKS, ROWS = 4, 1 << 18  # a gathered buffer of 64 MiB in fp32


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (gather, ("split", torch.float32, torch.float32)),
        (gather, ("planned", torch.float32, torch.bfloat16)),
        (reduce, ("split", torch.float32, torch.bfloat16, "avg", None)),
        (reduce, ("planned", torch.float32, torch.float16, "sum", 4.0)),
        (accumulate, ("split", torch.bfloat16)),
        (views_survive, ()),
        (backward_after_release, (torch.bfloat16,)),
        (alias, ()),
    ],
)
def test_what_holds_on_cpu_holds_on_one_cuda_rank(fn, args):
    run_ranks(1, fn, *args, device="cuda")


@on_ranks(1, device="cuda")
def test_nccl_takes_several_dtypes_in_one_call():
    group = dist.group.WORLD
    assert group is not None
    tensors = [torch.ones(64, device="cuda", dtype=d) for d in (torch.float32, torch.bfloat16)]
    receive = [torch.zeros_like(t) for t in tensors]
    transport = transport_of(group, "collectives")
    # Queued, without a handle: the stream is ordered.
    transport.all_gather(list(zip(receive, tensors, strict=True)), "x")
    transport.reduce_scatter(list(zip(receive, tensors, strict=True)), "avg", "x")
    transport.all_reduce(receive[:1], "sum", "x")
    assert all(t.eq(1).all() for t in receive)
    mesh_of()
    buffer = load(make(), {n: t.cuda() for n, t in full_tensors().items()})
    assert sum(v.float().abs().sum().item() for v in buffer.local_views.values()) > 0


def groups(mesh, count, full_dtype, recycler):
    layout = plan([TensorSpec("w", (ROWS, 64))], RANKS)
    options = {"dtype": torch.float32, "full_dtype": full_dtype, "recycler": recycler, "check_ranks": False}
    return [DBuffer(layout, mesh, name=f"layers.{i}", **options) for i in range(count)]


def walk(buffers, stream, compute, depth=1):
    """Gather ahead on `stream`, compute on the current one, release there."""
    handles = {}
    for index, buffer in enumerate(buffers):
        for ahead in range(index, min(index + depth + 1, len(buffers))):
            if ahead not in handles:
                handles[ahead] = Gather([buffers[ahead]]).start(stream=stream, after=())
        handles[index].wait()
        compute(buffer)
        buffer.release()


@pytest.mark.parametrize("full_dtype", [torch.float32, torch.bfloat16])
def test_recycled_memory_is_never_written_before_its_last_reader_is_done(full_dtype):
    with simulated_mesh(RANKS, "cuda") as mesh:
        buffers, seen = groups(mesh, 6, full_dtype, Recycler("cuda")), []
        for value, buffer in enumerate(buffers):
            buffer.shard[0].fill_(value + 1)
        torch.cuda.synchronize()
        stream = device_layer("cuda").new_stream()

        def compute(buffer):
            torch.cuda._sleep(20_000_000)  # so that a gather that did not wait would be first
            seen.append((buffer.views["w"].amin(), buffer.views["w"].amax()))

        for _ in range(3):
            walk(buffers, stream, compute)
        found = [(low.item(), high.item()) for low, high in seen]
    assert found == [(i, i) for i in range(1, 7)] * 3


def test_gathers_and_compute_overlap(tmp_path):
    with simulated_mesh(RANKS, "cuda") as mesh:
        buffers, stream = groups(mesh, 6, torch.float32, Recycler("cuda")), device_layer("cuda").new_stream()
        x = torch.randn(256, 256, device="cuda")

        def compute(buffer):
            for _ in range(60):  # small, so that a few multiprocessors do it
                x.copy_(x @ x).clamp_(-1, 1)

        walk(buffers, stream, compute)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.cuda._sleep(100_000_000)  # so that the CPU is ahead and the device decides what overlaps
            walk(buffers, stream, compute)
            torch.cuda.synchronize()
        trace = tmp_path / "trace.json"
        profile.export_chrome_trace(str(trace))
    spans: dict = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy") and "spin" not in event["name"]:
            spans.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    # The stream with the most kernels computes; the sleep counts neither way.
    compute_spans = max(spans.values(), key=len)
    gather_spans = [span for one in spans.values() if one is not compute_spans for span in one]
    assert gather_spans
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in gather_spans for b in compute_spans)
    assert both > 0.3 * sum(stop - start for start, stop in gather_spans)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_allocators_peak_is_shards_and_prefetch_depth_plus_one_gathered_buffers(depth):
    with simulated_mesh(RANKS, "cuda") as mesh:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
        recycler = Recycler("cuda")
        buffers, stream = groups(mesh, 5, torch.bfloat16, recycler), device_layer("cuda").new_stream()
        recycler.trim()
        torch.cuda.reset_peak_memory_stats()
        walk(buffers, stream, lambda buffer: None, depth)
        torch.cuda.synchronize()
        first = torch.cuda.memory_stats()
        gathered, shards = ROWS * 64 * 2, 5 * ROWS * 64 // RANKS * 4
        assert first["allocated_bytes.all.peak"] - before == shards + (depth + 1) * gathered
        for _ in range(3):
            walk(buffers, stream, lambda buffer: None, depth)
        torch.cuda.synchronize()
        last = torch.cuda.memory_stats()
        for key in ("num_device_alloc", "allocated_bytes.all.peak", "reserved_bytes.all.peak"):
            assert first[key] == last[key]


@pytest.mark.parametrize(
    "fmt",
    [BlockFP8(), BlockFP8((32, 32), "fp32"), BlockFP8((1, 32)), BlockInt8(256, "stochastic"), BlockNF4()],
    ids=str,
)
def test_formats_have_the_codes_scales_and_values_of_the_cpu(fmt):
    values = torch.randn(400, 1056) * torch.exp(3 * torch.randn(400, 1056))
    values[7, 9], values[300, 1000] = float("nan"), float("inf")
    grid, found = fmt.grid(values.shape), []
    runs = RunList(
        [
            RowRun(grid, 0, 256),
            RowRun(grid, 256, 400, 256 * 1056, 256 * fmt.code_bytes(1056), grid.scales_of(256, 400)[0]),
        ]
    )
    noise = {"noise": Noise(1, 2, 3)} if fmt.needs_noise else {}
    for device in ("cpu", "cuda"):
        codes = torch.zeros(400 * fmt.code_bytes(1056), dtype=torch.uint8, device=device)
        scales = torch.zeros(grid.num_scales, device=device)
        out = torch.zeros(400 * 1056, device=device)
        fmt.quantize(runs, values.view(-1).to(device), codes, scales, **noise)
        fmt.dequantize(runs, codes, scales, out)
        half = out.bfloat16()
        fmt.dequantize(runs, codes, scales, half)
        found.append([t.cpu() for t in (codes, scales, out, half)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)

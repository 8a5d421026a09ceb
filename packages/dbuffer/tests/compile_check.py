# mypy: disable-error-code="import-untyped, import-not-found"
"""Run by test_kernels.py in a process of its own: compiles the kernels for an H100 (sm_90), where no GPU is needed.

Prints, for each: registers a thread, bytes of local memory (spilled registers), and whether memory moves in vectors.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dbuffer.encodings import BlockFP8, BlockInt8
from dbuffer.encodings.kernels import launch
from dbuffer.encodings.kernels import triton as kernels_triton

TYPES = {0: "*fp32", 1: "*i16", 2: "*fp16"}
TABLE = {"table": "*i64", "piece_of": "*i32"}
BUFFERS = {"codes": "*u8", "scales": "*fp32"}


def compile_(kernel, signature, constants):
    """(registers, bytes of local memory, PTX)."""
    constants = dict(constants)
    warps = constants.pop("num_warps")
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else signature[name] for name in names}
    on_16 = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
    for name in ("code_stride", "scale_stride"):
        if name in names:
            on_16[(names.index(name),)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, on_16)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", str(path)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (registers,) = re.findall(r"REG:(\d+)", shown)
    local = sum(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", shown))
    return int(registers), local, compiled.asm["ptx"]


def check(name, fmt, signature, loads, stores, **constants):
    """Raise unless a kernel compiles without local memory and moves memory in vectors."""
    fixed = launch.constants_of(fmt.tile) | {"VECTOR": True} | constants
    registers, local, ptx = compile_(getattr(kernels_triton, name), {**TABLE, **BUFFERS, **signature}, fixed)
    assert local == 0, f"{name} {fmt} {constants}: {local} bytes of local memory"
    for text in (loads, stores):
        assert re.search(text, ptx), f"{name} {fmt} {constants}: no {text}"
    print(f"compiled: {name} {fmt} {constants}: {registers} registers")


# How 1, 4 or 8 bytes of four-bit codes move.
CODES = {1: r"\.global\S*\.b8", 4: r"\.global\S*\.b32", 8: r"\.global\S*\.(v2\.b32|b64)"}


def check_pairs(name, kind, vector, unit, moves):
    """The same for four-bit codes: read, with `moves` of what is stored, or written, with that of what is loaded."""
    fixed, reads = (
        {"SIZE": 64, "GROUP": 256, "VECTOR": vector, "UNIT": unit, "TYPE": kind},
        name == "read_pairs",
    )
    if reads:
        signature = {"levels": "*fp32", "out": TYPES[kind]}
        fixed |= {"PAIRS": launch.PAIRS, "num_warps": 4}
    else:
        signature = {"middles": "*fp32", "values": TYPES[kind]}
        fixed |= launch.pair_constants(64) | {"MIDDLES": 15}
    registers, local, ptx = compile_(getattr(kernels_triton, name), TABLE | BUFFERS | signature, fixed)
    assert local == 0, f"{name} {kind} {vector}: {local} bytes of local memory"
    for text in (moves, f"{'ld' if reads else 'st'}{CODES[unit]}"):
        assert re.search(text, ptx), f"{name} {kind} {vector} {unit}: no {text}"
    print(f"compiled: {name} {kind} {vector} {unit}: {registers} registers")


if __name__ == "__main__":
    for unit in (1, 4, 8):
        check_pairs("write_pairs", 0, True, unit, r"ld\.global\S*\.v4\.b32")
        stores = r"st\.global\S*\.b32" if unit == 1 else r"st\.global\S*\.v4\.b32"
        check_pairs("read_pairs", 1, True, unit, stores)
    check_pairs("write_pairs", 1, True, 8, r"ld\.global\S*\.v[24]\.b32")
    check_pairs("write_pairs", 2, False, 1, r"ld\.global")
    check_pairs("read_pairs", 0, False, 1, r"st\.global")
    wide, narrow = r"ld\.global\S*\.v[24]\.b(32|64)", r"\.global\S*\.(v[24]\.b32|b32|b64)"
    fp8 = {"CODE": 0, "TOP": 448.0, "POW2": True}
    integers = {"CODE": 1, "TOP": 127.0, "POW2": False}
    strides = {"code_stride": "i32", "scale_stride": "i32"}
    formats = ((BlockFP8(), fp8), (BlockFP8((1, 32)), fp8), (BlockInt8(256, "stochastic"), integers))
    for fmt, code in formats:
        keys = {"first": "i32", "second": "i32"}
        for kind in (0, 1):
            check(
                "quantize_tiles", fmt, {"values": TYPES[kind], **keys}, wide, f"st{narrow}",
                TYPE=kind, RANDOM=fmt.needs_noise, **code,
            )  # fmt: skip
        check("amax_tiles", fmt, {"values": TYPES[0], "out": "*fp32"}, wide, "st.global", TYPE=0)
        for kind, ranks in ((1, 1), (0, 2), (0, 8)):
            check(
                "sum_tiles", fmt, {"out": TYPES[kind], **strides}, f"ld{narrow}", wide.replace("ld", "st"),
                TYPE=kind, CODE=code["CODE"], RANKS=ranks,
            )  # fmt: skip

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

from dbuffer.encodings import BlockFP8, BlockInt8, BlockNF4, kernels, launch

TYPES = {0: "*fp32", 1: "*i16", 2: "*fp16"}
TABLE = {"table": "*i64", "piece_of": "*i32"}
BUFFERS = {"codes": "*u8", "scales": "*fp32", "levels": "*fp32"}


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
    fixed = launch.constants_of(fmt) | {"VECTOR": True} | constants
    registers, local, ptx = compile_(getattr(kernels, name), {**TABLE, **BUFFERS, **signature}, fixed)
    assert local == 0, f"{name} {fmt} {constants}: {local} bytes of local memory"
    for text in (loads, stores):
        assert re.search(text, ptx), f"{name} {fmt} {constants}: no {text}"
    print(f"compiled: {name} {fmt} {constants}: {registers} registers")


if __name__ == "__main__":
    wide, narrow = r"ld\.global\S*\.v[24]\.b(32|64)", r"\.global\S*\.(v[24]\.b32|b32|b64)"
    strides = {"code_stride": "i32", "scale_stride": "i32"}
    for fmt in (BlockFP8(), BlockFP8((1, 32)), BlockInt8(256, "stochastic")):
        keys = {"first": "i32", "second": "i32"}
        for kind in (0, 1):
            check(
                "quantize_tiles", fmt, {"values": TYPES[kind], **keys}, wide, f"st{narrow}",
                TYPE=kind, RANDOM=fmt.needs_noise, TOP=fmt.top, POW2=fmt.scale == "pow2",
            )  # fmt: skip
        for kind, ranks in ((1, 1), (0, 2), (0, 8)):
            check(
                "sum_tiles", fmt, {"out": TYPES[kind], **strides}, f"ld{narrow}", wide.replace("ld", "st"),
                TYPE=kind, RANKS=ranks, SIZE=fmt.size,
            )  # fmt: skip
    for kind, vector in ((0, True), (1, True), (1, False)):
        stores, loads = (wide.replace("ld", "st"), f"ld{narrow}") if vector else ("st.global", "ld.global")
        check(
            "sum_tiles", BlockNF4(64), {"out": TYPES[kind], **strides}, loads, stores,
            TYPE=kind, RANKS=1, SIZE=64, VECTOR=vector,
        )  # fmt: skip

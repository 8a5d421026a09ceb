# mypy: disable-error-code="import-untyped, import-not-found"
"""The Triton kernels of block-optim, compiled for three GPUs on a machine without one; dbuffer's tests compile its own.

Each compilation takes seconds, so these are representatives.
"""

import functools
import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from block_optim.adam.q8.variants import Types, quantized_variant
from ragged_shard.device import has_triton

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
ARCHITECTURES = (80, 90, 100)
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A representative: the tile of 8-bit states, and how its kernel is chosen."""

    tile: tuple[int, int]
    types: Types
    aligned: bool = True

    @property
    def variant(self):
        return quantized_variant(self.tile, self.types, self.aligned, self.tile[0] == 1)


CASES = {
    "elements:256 bf16": Case((1, 256), Types(BF16, BF16)),
    "tile:128x128 bf16": Case((128, 128), Types(BF16, BF16)),
    "tile:128x128 fp32": Case((128, 128), Types(FP32, FP32)),
    "elements:256 fp32": Case((1, 256), Types(FP32, FP32)),
    "elements:256 bf16 stochastic": Case((1, 256), Types(BF16, BF16, True)),
    "tile:32x32 bf16": Case((32, 32), Types(BF16, BF16)),
}
EVERYWHERE = list(CASES)[:3]  # one of each way to hold a tile
CHOSEN = [(name, arch) for arch in ARCHITECTURES for name in (CASES if arch == 90 else EVERYWHERE)]
MOST_REGISTERS = {"tile:128x128 fp32": 168}


@dataclass(frozen=True)
class Facts:
    """The result of compiling a kernel.

    Attributes:
        local: loads and stores of local memory: spilled registers.
        accesses, stored: how many accesses of global memory, and how many stores, have a width in bytes.
        fused, flushed: multiply-adds, and operations that flush denormals, in the PTX outside inline assembly.
    """

    registers: int
    stack: int
    local: int
    accesses: Counter[int]
    stored: Counter[int]
    fused: int
    flushed: int


@functools.cache
def facts_of(case, arch):
    """Compile a representative for an architecture as it would be launched, and read it."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = case.variant
    pointers = dict.fromkeys(("rates", "counts"), "*fp32") | {"table": "*i64", "row_of": "*i32"}
    for state in ("first", "second"):
        pointers |= {f"{state}_values": "*fp32", f"{state}_base": "*i32", f"{state}_limit": "*i32"}
    names = variant.kernel.arg_names
    signature = {name: pointers.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    on_16 = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in pointers}
    source = ASTSource(variant.kernel, signature, constants, on_16)
    options = {"num_warps": variant.num_warps, "enable_fp_fusion": False}
    build = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(build.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
    report = text.stdout + text.stderr
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage, f"cuobjdump prints no registers:\n{report[:500]}"
    ops = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+).*?;", report, re.MULTILINE)
    accesses = [op for op in ops if op.startswith(("LDG.", "STG."))]
    ptx = re.sub(r"// begin inline asm.*?// end inline asm", "", build.asm["ptx"], flags=re.DOTALL)
    return Facts(
        int(usage[1]),
        int(usage[2]),
        sum(op.startswith(("LDL", "STL")) for op in ops),
        Counter(map(width, accesses)),
        Counter(width(op) for op in accesses if op.startswith("STG")),
        len(re.findall(r"\bfma\.", ptx)),
        ptx.count(".ftz"),
    )


def width(op):
    """Bytes of an access."""
    for suffix, nbytes in (("128", 16), ("64", 8), ("8", 1), ("16", 2)):
        if any(field.lstrip("US") == suffix for field in op.split(".")[1:]):
            return nbytes
    return 4


@pytest.mark.parametrize(("name", "arch"), CHOSEN)
def test_a_kernel_spills_nothing_rounds_every_operation_and_has_whole_vectors(name, arch):
    case = CASES[name]
    facts, variant = facts_of(case, arch), case.variant
    assert (facts.local, facts.stack) == (0, 0)
    assert facts.registers <= MOST_REGISTERS.get(name, 128)
    assert (facts.fused, facts.flushed) == (0, 0)
    twice = variant.constants.get("PASSES") == 2
    # elements that the code is written out for
    held = variant.elements / (32 * variant.num_warps) / (variant.pieces if twice else 1)
    param, grad = case.types.param.itemsize, case.types.grad.itemsize
    read = param + grad * (2 if twice else 1)
    assert facts.accesses[16] * 16 == held * (read + param)
    assert facts.stored[16] * 16 == held * param
    assert facts.stored[8] * 8 == held * 2
    assert set(facts.stored) == {16, 8, 4}
    assert facts.stored[4] <= 2  # the scales


@pytest.mark.parametrize("name", CASES)
def test_a_multiprocessor_runs_four_programs_or_more_at_once(name):
    threads = 32 * CASES[name].variant.num_warps
    registers = 8 * -(-facts_of(CASES[name], 90).registers // 8)
    assert min(65536 // (threads * registers), 2048 // threads) >= 4


def test_addresses_that_are_not_aligned_get_narrow_accesses_and_spill_nothing():
    facts = facts_of(Case((1, 256), Types(BF16, BF16), aligned=False), 90)
    assert (facts.local, facts.stack) == (0, 0)
    assert 16 not in facts.accesses
    assert set(facts.stored) == {4, 2, 1}  # scales, parameters, codes


def test_kernels_are_not_for_rocm_whose_devices_have_the_same_name(monkeypatch):
    for hip, runs in ((None, True), ("6.4", False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert has_triton(torch.device("cuda")) == runs

# mypy: disable-error-code="import-untyped, import-not-found"
"""Kernels of block-optim and dbuffer: what they compile to, without a GPU, and their rates.

python -m bench kernels [--arch 90] [NAME ...]    registers, instructions, an estimate of the rate
python -m bench rates [--tiny]                    measured, compared with a copy, a large product, and others' kernels

Compiles representatives of each kernel, block and dtype for sm_80, sm_90 or sm_100, as they would be launched, with
bf16 values where no dtype is named, and reads PTX and machine code. Spills: local-memory loads and stores. Programs:
how many a multiprocessor runs at once, by registers and threads; one alone waits for its memory. Widths: of all
accesses of tensors, in bytes. Instructions an element: on the usual path (no slow paths of divisions), loops counted as
often as they run.

The share is AN ESTIMATE, not a measurement: an H200's 132 multiprocessors at 1.98 GHz issue 128 instructions a cycle
(of all lanes), 64 of integer and compare instructions, 16 of special functions, and its memory moves 4.8 TB/s; each
is taken to be busy all the time. The share is the time of the bytes over the longest of these times. Latency, launch,
caches and the ramp at both ends are left out, so a kernel cannot do better than this and may do worse.

Rates: TFLOP/s of Newton-Schulz (of: a product in the same dtype), GB/s of 8-bit AdamW's step and of decoding FP8
and NF4 to bf16 (of: a copy of as many bytes). Bytes are those that a kernel must read and write at least; others'
kernels are counted with the bytes of ours. On a GPU CUDA events time five calls in a row; on a CPU it is one thread's
CPU time. Medians, all in turns. *Error*: mean difference of decoded values over their mean size.
"""

import functools
import importlib
import importlib.util
import re
import subprocess
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from block_optim.muon.newton_schulz import orthogonalize
from dbuffer.encodings import BlockFP8, BlockInt8, BlockNF4, RowRun
from layout_planner import Elements, Tile

from .measure import interleave, medians_ms, print_tables, table, table_of, timer_of
from .optimizers import LLAMAS, flops_of, unchecked

SMS, CLOCK, BANDWIDTH = 132, 1.98e9, 4.8e12
ISSUE, INTEGER, SPECIAL = 128, 64, 16  # lanes' instructions a cycle and multiprocessor
INTEGER_OPS = {
    "LOP3", "SHF", "IADD3", "VIADD", "ISETP", "FSETP", "FMNMX", "FMNMX3", "IMNMX", "VIMNMX", "VIMNMX3", "SEL", "FSEL",
    "PRMT", "LEA", "PLOP3", "SGXT", "BMSK", "IABS", "VABSDIFF", "F2FP", "VIADDMNMX",
}  # fmt: skip
SPECIAL_OPS = {"MUFU", "FCHK", "I2F", "F2I", "I2FP", "F2F"}
ARCHITECTURES = (80, 90, 100)
HEAD = [
    "kernel", "arch", "registers", "spills", "stack", "programs", "widths", "instructions", "static", "bytes",
    "share (estimate)",
]  # fmt: skip
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z0-9_.]+)(.*?);")
_ACCESS = re.compile(r"(?:LDG|STG)\.")
_ASSEMBLY = re.compile(r"// begin inline asm.*?// end inline asm", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """A representative.

    Attributes:
        tile: of 8-bit states.
        dtypes: of parameters and gradients, "fp32" or "bf16".
        scalar: for addresses that are not aligned.
    """

    name: str
    tile: tuple[int, int]
    dtypes: tuple[str, str]
    rounds: bool = False
    scalar: bool = False
    single: bool = False

    @property
    def variant(self) -> Any:
        """What `Launch` would compile."""
        from block_optim.adam.q8.variants import Types, quantized_variant

        named = {"fp32": torch.float32, "bf16": torch.bfloat16}
        param, grad = (named[d] for d in self.dtypes)
        return quantized_variant(self.tile, Types(param, grad, self.rounds), not self.scalar, self.single)

    @property
    def pointers(self) -> dict[str, str]:
        """Types of the kernels' arguments."""
        types = dict.fromkeys(("rates", "counts"), "*fp32") | {"table": "*i64", "row_of": "*i32"}
        for state in ("first", "second"):
            types |= {f"{state}_values": "*fp32", f"{state}_base": "*i32", f"{state}_limit": "*i32"}
        return types

    @property
    def data_bytes(self) -> tuple[int, int]:
        """Bytes an element of tensors that are read and of those that are written, codes aside."""
        param, grad = (4 if d == "fp32" else 2 for d in self.dtypes)
        return param + grad, param

    @property
    def bytes_moved(self) -> float:
        """Bytes an element, each tensor read and written once; scales included."""
        return sum(self.data_bytes) + 4 + 16 / (self.tile[0] * self.tile[1])


@dataclass(frozen=True)
class WireVariant:
    """How a kernel of dbuffer's formats is launched; `elements`: that a program writes or reads."""

    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    elements: int


@dataclass(frozen=True)
class WireCase:
    """A representative of dbuffer's: bf16 to codes of a format, or back."""

    name: str
    encodes: bool
    format: Any

    @property
    def variant(self) -> WireVariant:
        """How it is launched where rows lie on 16 elements, of which blocks do not cross the ends."""
        from dbuffer.encodings import kernels, launch

        fmt = self.format
        fixed = launch.constants_of(fmt) | {"VECTOR": True, "TYPE": 1}
        warps, elements = fixed.pop("num_warps"), fixed["SPAN_ROWS"] * fixed["SPAN_COLUMNS"]
        if not self.encodes:
            return WireVariant(kernels.sum_tiles, fixed | {"RANKS": 1, "SIZE": fmt.size}, warps, elements)
        fixed |= {"TOP": fmt.top, "POW2": fmt.pow2, "RANDOM": False}
        return WireVariant(kernels.quantize_tiles, fixed, warps, elements)

    @property
    def pointers(self) -> dict[str, str]:
        """Types of the kernels' arguments."""
        types = {"values": "*i16", "out": "*i16", "codes": "*u8", "table": "*i64", "piece_of": "*i32"}
        types |= dict.fromkeys(("scales", "levels"), "*fp32")
        return types | dict.fromkeys(("first", "second", "code_stride", "scale_stride"), "i32")

    @property
    def bytes_moved(self) -> float:
        """Bytes an element of values, codes and scales, for rows of 4096 columns."""
        grid = self.format.grid((128, 4096))
        return 2 + (128 * self.format.code_bytes(4096) + 4 * grid.num_scales) / (128 * 4096)


def wire_formats() -> dict[str, Any]:
    """Representatives of dbuffer's formats."""
    return {
        "fp8 128x128": BlockFP8((128, 128)), "fp8 32x32": BlockFP8((32, 32)),
        "int8": BlockInt8(256), "nf4": BlockNF4(64),
    }  # fmt: skip


def wire_cases() -> list[WireCase]:
    """The formats, each way that has a kernel."""
    return [
        WireCase(f"{way} {name}", way == "encode", fmt)
        for name, fmt in wire_formats().items()
        for way in ("encode", "decode")
        if way == "decode" or fmt.kernel_writes
    ]


def _case(name: str, tile: tuple[int, int], *dtypes: str, **options: Any) -> Case:
    return Case(name, tile, (dtypes[0], dtypes[-1]), single=tile[0] == 1, **options)


CASES = (
    _case("elements:256 fp32", (1, 256), "fp32"),
    _case("elements:256 bf16", (1, 256), "bf16"),
    _case("elements:256 bf16, fp32 gradients", (1, 256), "bf16", "fp32"),
    _case("elements:256 bf16 stochastic", (1, 256), "bf16", rounds=True),
    _case("elements:256 bf16, not aligned", (1, 256), "bf16", scalar=True),
    _case("elements:2048 bf16", (1, 2048), "bf16"),
    _case("tile:32x32 fp32", (32, 32), "fp32"),
    _case("tile:32x32 bf16", (32, 32), "bf16"),
    _case("tile:128x128 fp32", (128, 128), "fp32"),
    _case("tile:128x128 bf16", (128, 128), "bf16"),
)


@dataclass(frozen=True)
class Instruction:
    """One of the machine code."""

    address: int
    predicate: str
    op: str
    rest: str

    @property
    def target(self) -> int | None:
        """Where a branch or a call goes."""
        addresses = re.findall(r"0x[0-9a-f]+", self.rest)
        return int(addresses[-1], 16) if addresses and self.op.split(".")[0] in ("BRA", "CALL") else None


@dataclass(frozen=True)
class Facts:
    """What a kernel compiled to; counts are of a thread.

    Attributes:
        usual: instructions on the usual path by name, loops as often as they run.
        accesses: how many loads and stores of global memory have a width in bytes.
        stored: the same of stores alone.
        fused, flushed: multiply-adds, and operations that flush denormals, in the PTX outside inline assembly.
    """

    registers: int
    stack: int
    local: int
    static: int
    usual: Counter[str]
    accesses: Counter[int]
    stored: Counter[int]
    fused: int
    flushed: int


@functools.cache
def facts_of(case: Case | WireCase, arch: int) -> Facts:
    """Compile a representative for an architecture, and read it. Needs Triton, no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant: Any = case.variant
    pointers = case.pointers
    names = variant.kernel.arg_names
    signature = {name: pointers.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    on_16 = [name for name in names if pointers.get(name, "") not in ("", "i32") or name.endswith("_stride")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in on_16}
    source = ASTSource(variant.kernel, signature, constants, attributes)
    options = {"num_warps": variant.num_warps, "enable_fp_fusion": False}
    build = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    loops = variant.pieces if variant.constants.get("PASSES") == 2 else 1
    return read(build.asm["cubin"], build.asm["ptx"], loops)


def read(cubin: bytes, ptx: str, loops: int) -> Facts:
    """The facts of one kernel; every loop runs ``loops`` times."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
    report = text.stdout + text.stderr
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage, f"cuobjdump says nothing of registers:\n{report[:500]}"
    code = [
        Instruction(int(m[1], 16), m[2] or "", m[3], m[4])
        for line in report.splitlines()
        if (m := _LINE.match(line))
    ]
    while code[-1].op == "NOP":
        code.pop()
    accesses = [i.op for i in code if _ACCESS.match(i.op)]
    ptx = _ASSEMBLY.sub("", ptx)
    return Facts(
        int(usage[1]),
        int(usage[2]),
        sum(i.op.startswith(("LDL", "STL")) for i in code),
        len(code),
        _usual(code, loops),
        Counter(map(_width, accesses)),
        Counter(_width(op) for op in accesses if op.startswith("STG")),
        len(re.findall(r"\bfma\.", ptx)),
        ptx.count(".ftz"),
    )


def _width(op: str) -> int:
    for suffix, width in ((".128", 16), (".64", 8), ("8", 1), ("16", 2)):
        if any(field.lstrip("US") == suffix.lstrip(".") for field in op.split(".")[1:]):
            return width
    return 4


def _usual(code: list[Instruction], loops: int) -> Counter[str]:
    """Instructions that run when no block calls a slow path, loops as often as they run."""
    index = {i.address: n for n, i in enumerate(code)}
    starts = {0}
    for n, i in enumerate(code):
        if i.op.split(".")[0] in ("BRA", "CALL", "EXIT", "RET"):
            starts.add(n + 1)
        if i.target is not None:
            starts.add(index[i.target])
    order = sorted(n for n in starts if n < len(code))
    ends = dict(zip(order, [*order[1:], len(code)], strict=True))
    reached, todo = set(), [0]
    while todo:
        start = todo.pop()
        if start in reached or start not in ends:
            continue
        last = code[ends[start] - 1]
        name = last.op.split(".")[0]
        if name == "CALL" and not last.predicate:  # with one it is a branch: sm_80 leaves loops so
            continue
        reached.add(start)
        if last.target is not None:
            todo.append(index[last.target])
        if name not in ("BRA", "EXIT", "RET") or last.predicate or "," in last.rest:
            todo.append(ends[start])
    back = [i for i in code if i.op.startswith("BRA") and i.target is not None and i.target < i.address]
    counts: Counter[str] = Counter()
    for start in reached:
        for i in code[start : ends[start]]:
            inside = any(b.target <= i.address <= b.address for b in back if b.target is not None)
            counts[i.op.split(".")[0]] += loops if inside else 1
    return counts


def share(case: Case | WireCase, facts: Facts, per_thread: float) -> float:
    """The estimated share of the memory's bandwidth; ``per_thread``: elements of a thread."""
    memory = case.bytes_moved / BANDWIDTH
    cycles = [
        facts.usual.total() / ISSUE,
        sum(n for op, n in facts.usual.items() if op in INTEGER_OPS) / INTEGER,
        sum(n for op, n in facts.usual.items() if op in SPECIAL_OPS) / SPECIAL,
    ]
    return memory / max(memory, *(c / per_thread / (SMS * CLOCK) for c in cycles))


def programs(registers: int, warps: int) -> int:
    """How many programs a multiprocessor of 65,536 registers and 2,048 threads has at once, with no shared memory."""
    return min(65536 // (warps * 32 * -(-registers // 8) * 8), 2048 // (warps * 32), 32)


def elements_per_thread(case: Case | WireCase) -> float:
    """Elements that a thread has in the whole run of its program."""
    variant: Any = case.variant
    return float(variant.elements / (32 * variant.num_warps))


def row_of(case: Case | WireCase, facts: Facts, per_thread: float, arch: int) -> list[str]:
    """A row of the table."""
    widths = " ".join(f"{facts.accesses[w]}x{w}" for w in sorted(facts.accesses, reverse=True))
    return [
        case.name, f"sm_{arch}", str(facts.registers), str(facts.local), str(facts.stack),
        str(programs(facts.registers, case.variant.num_warps)), widths,
        f"{facts.usual.total() / per_thread:.0f}", f"{facts.static / per_thread:.0f}", f"{case.bytes_moved:.1f}",
        f"{share(case, facts, per_thread):.2f}",
    ]  # fmt: skip


def main_kernels(parser: ArgumentParser, arguments: list[str]) -> None:
    """Print the table."""
    parser.add_argument("names", nargs="*", help="only kernels whose name contains one of these")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, default=90)
    options = parser.parse_args(arguments)
    cases: list[Case | WireCase] = [*CASES, *wire_cases()]
    rows = [
        row_of(case, facts_of(case, options.arch), elements_per_thread(case), options.arch)
        for case in cases
        if not options.names or any(name in case.name for name in options.names)
    ]
    print(*__doc__.split("\n\n")[2:4], sep="\n\n", end="\n\n")
    print(table(HEAD, rows))


# -- rates -------------------------------------------------------------------------------------------------------------

Call = Callable[[], Any]
Calls = dict[str, Call]
Row = dict[str, Any]
STEPS = tuple(case for case in CASES if not case.scalar and len(set(case.dtypes)) == 1)
OURS = ("block_optim", "dbuffer")
STACKS = ((1, 16, 16), (1, 4, 16), (1, 56, 16), (8, 4, 4))  # matrices, rows, columns, in units


def unit_of(device: str, tiny: bool) -> int:
    """Rows of a unit of sizes: 256, for matrices of an 8B model, on a GPU."""
    return 8 if tiny else 256 if device == "cuda" else 16


@dataclass(frozen=True)
class Turn:
    """A call, its bytes or operations, and the name of the call whose rate is its limit."""

    call: Call
    amount: float
    limit: str


def rated(kernel: str, case: str, turns: dict[str, Turn], device: str) -> list[Row]:
    """A row for each turn: its median, its amount a second, and that as a share of its limit's."""
    times, rounds, warm_up = (5, 15, 3) if device == "cuda" else (1, 3, 1)

    def repeat(call: Call) -> None:
        for _ in range(times):
            call()

    calls = {name: partial(repeat, turn.call) for name, turn in turns.items()}
    taken = medians_ms(interleave(calls, rounds, warm_up=warm_up, timer=timer_of(device)))
    rates = {name: 1e3 * turn.amount * times / taken[name] for name, turn in turns.items()}
    return [
        {"kernel": kernel, "case": case, "by": name, "ms": taken[name] / times, "rate": rates[name],
         "share": rates[name] / rates[turn.limit]}
        for name, turn in turns.items()
    ]  # fmt: skip


def moving(kernel: str, case: str, calls: Calls, nbytes: float, device: str) -> list[Row]:
    """Rows of calls that move as many bytes as a copy, which comes first."""
    source, target = torch.empty(2, int(nbytes) // 2, dtype=torch.uint8, device=device)
    calls = {"copy": partial(target.copy_, source), **calls}
    return rated(kernel, case, {name: Turn(call, nbytes, "copy") for name, call in calls.items()}, device)


# -- others' kernels ---------------------------------------------------------------------------------------------------


def torchao_step(params: Callable[[], list[Any]], case: Case) -> Call:
    """A step of torchao's AdamW8bit."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(params(), block_size=256, bf16_stochastic_round=case.rounds).step


def bitsandbytes_step(params: Callable[[], list[Any]], case: Case) -> Call:
    """A step of bitsandbytes' AdamW8bit, in blocks of 256 too."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params()).step


def torchao_fp8(x: Any) -> Call:
    """Decodes torchao's FP8 with a scale for 128x128."""
    from torchao.quantization import Float8Tensor, PerBlock

    return Float8Tensor.from_hp(x, granularity=PerBlock([128, 128])).dequantize


def torchao_nf4(x: Any) -> Call:
    """Decodes torchao's NF4 in blocks of 64."""
    from torchao.quantization import to_nf4

    return to_nf4(x, block_size=64, scaler_block_size=256).get_original_weight


def bitsandbytes_nf4(x: Any) -> Call:
    """Decodes bitsandbytes' NF4 in blocks of 64, scales quantized too."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return partial(
        dequantize_4bit, *quantize_4bit(x, blocksize=64, compress_statistics=True, quant_type="nf4")
    )


PEERS: dict[str, dict[str, Callable[..., Call]]] = {
    "elements:256 fp32": {"torchao": torchao_step, "bitsandbytes": bitsandbytes_step},
    "elements:256 bf16": {"torchao": torchao_step, "bitsandbytes": bitsandbytes_step},
    "elements:256 bf16 stochastic": {"torchao": torchao_step},
    "fp8 128x128": {"torchao": torchao_fp8},
    "nf4": {"torchao": torchao_nf4, "bitsandbytes": bitsandbytes_nf4},
}  # by case


def others(case: str, missing: dict[str, str], *args: Any) -> Calls:
    """Others' calls for a case, made from `args`; `missing` gets the reason for each that cannot run."""
    calls: Calls = {}
    for package, maker in PEERS.get(case, {}).items():
        if importlib.util.find_spec(package) is None:
            missing[package] = "not installed"
            continue
        try:
            call = maker(*args)
            call()
        except Exception as error:  # a peer that does not work here must not cost the others their figures
            missing[f"{package}, {case}"] = f"{type(error).__name__}: {error}"
        else:
            calls[package] = call
    return calls


# -- what is measured --------------------------------------------------------------------------------------------------


def newton_schulz(device: str, tiny: bool) -> Iterator[Row]:
    """Rows of an 8B model's matrices, and of a stack of small ones."""
    unit, same = unit_of(device, tiny), "product, bfloat16"
    large = 32 * unit
    a = torch.randn(large, large, device=device).bfloat16()
    product = partial(torch.mm, a, a, out=torch.empty_like(a))
    function = getattr(importlib.import_module("torch.optim._muon"), "_zeropower_via_newtonschulz", None)
    for n, rows, columns in STACKS:
        matrices = list(torch.randn(n, rows * unit, columns * unit, device=device).bfloat16())
        flops = n * flops_of(rows * unit, columns * unit, matrices[0].device)
        turns = {same: Turn(product, 2.0 * large**3, same)}
        turns["block_optim"] = Turn(lambda own=matrices: [orthogonalize(m) for m in own], flops, same)
        if function is not None:  # a private function of torch, which some releases lack
            copies = [m.clone() for m in matrices]  # it normalizes bf16 matrices in place
            turns["torch.optim.Muon's"] = Turn(partial(_each, function, copies), flops, same)
        yield from rated("Newton-Schulz", f"{n} x {rows * unit}x{columns * unit}", turns, device)


def _each(function: Any, matrices: list[Any]) -> None:
    for matrix in matrices:
        function(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)


def adamw_steps(device: str, tiny: bool, missing: dict[str, str]) -> Iterator[Row]:
    """Rows of a layer's matrices, for the representatives of `bench kernels`."""
    from block_optim import AdamW8bit

    unit, (_, shapes) = unit_of(device, tiny), LLAMAS["llama-3-8b"]

    def params(case: Case) -> list[Any]:
        made = []
        for rows, columns in shapes:
            value = torch.randn(rows * unit // 256, columns * unit // 256, device=device)
            made.append(torch.nn.Parameter(value if case.dtypes[0] == "fp32" else value.bfloat16()))
            made[-1].grad = torch.randn_like(made[-1])
        return made

    for case in STEPS:
        tile: Any = case.tile
        block = Elements(tile[1]) if case.single else Tile(*tile)
        optimizer = unchecked(AdamW8bit, params(case), block=block, stochastic_rounding=case.rounds)
        calls: Calls = {"block_optim": optimizer.step}
        calls |= others(case.name, missing, partial(params, case), case)
        nbytes = case.bytes_moved * sum(param.numel() for param in optimizer.param_groups[0]["params"])
        yield from moving("8-bit AdamW", case.name, calls, nbytes, device)


def decoders(device: str, tiny: bool, missing: dict[str, str]) -> Iterator[Row]:
    """Rows of formats whose codes are read back as bf16."""
    unit = unit_of(device, tiny)
    x = torch.randn(16 * unit, 64 * unit, device=device).bfloat16()
    for case, form in wire_formats().items():
        if case == "int8":  # a form of reductions, which nobody else decodes
            continue
        run = RowRun(form.grid(x.shape), 0, len(x))
        codes = torch.empty(len(x) * form.code_bytes(x.shape[1]), dtype=torch.uint8, device=device)
        scales = torch.empty(run.num_scales, device=device)
        out = torch.empty_like(x)
        form.quantize([run], x.view(-1), codes, scales)
        calls: Calls = {"dbuffer": partial(form.dequantize, [run], codes, scales, out.view(-1))}
        calls |= others(case, missing, x)
        nbytes = codes.nbytes + scales.nbytes + out.nbytes
        for row in moving("decode", case, calls, nbytes, device):
            if row["by"] != "copy":
                decoded = calls[row["by"]]()
                difference = (out if decoded is None else decoded) - x
                row["error"] = float(difference.abs().mean() / x.abs().mean())
            yield row


def measure_rates(request: dict[str, Any]) -> dict[str, Any]:
    """All rows, the packages that were not compared and why, and a line; `request`: "device", and "tiny" sizes."""
    device, tiny, missing = request["device"], request["tiny"], dict[str, str]()
    rows = [
        *newton_schulz(device, tiny),
        *adamw_steps(device, tiny, missing),
        *decoders(device, tiny, missing),
    ]
    told = (rows[0]["case"], "elements:256 bf16", "fp8 128x128", "nf4")
    ours = [row for row in rows if row["case"] in told and row["by"] in OURS]
    parts = [f"{row['kernel']} {row['case']} {rate_of(row)}, {row['share']:.0%}" for row in ours]
    return {"rates": rows, "missing": missing, "line": "; ".join(parts)}


def rate_of(row: Row) -> str:
    """A row's rate with its unit."""
    floating = row["kernel"] == "Newton-Schulz"
    return f"{row['rate'] / 1e12:.3f} TFLOP/s" if floating else f"{row['rate'] / 1e9:.1f} GB/s"


def rates_table(answer: dict[str, Any]) -> dict[str, Any]:
    """The table of `measure_rates`."""
    text = "Of: a copy of as many bytes, or a large product in the same dtype."
    text += "".join(f" {name}: {why}." for name, why in answer["missing"].items())
    rows = [
        [row["kernel"], row["case"], row["by"], f"{row['ms']:.3f}", rate_of(row), f"{row['share']:.2f}",
         f"{row['error']:.3f}" if "error" in row else ""]
        for row in answer["rates"]
    ]  # fmt: skip
    return table_of("Rates of kernels", text, "kernel; case; by; ms; rate; of; error", rows)


def main_rates(parser: ArgumentParser, arguments: list[str]) -> None:
    """Print the table."""
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the path")
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print_tables([rates_table(measure_rates({"device": device, "tiny": parser.parse_args(arguments).tiny}))])

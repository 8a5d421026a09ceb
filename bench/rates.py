# mypy: disable-error-code="import-untyped, import-not-found"
"""Rates of the kernels of block_optim and dbuffer, compared with a copy, a large product, and others' kernels.

python -m bench rates [--tiny]

    Newton-Schulz   TFLOP/s of `orthogonalize`, and of torch.optim.Muon's function; of: a product in the same dtype
    8-bit AdamW     GB/s of a step; of: a copy of as many bytes
    decode          GB/s of FP8, NVFP4 and NF4 codes to bf16; of: a copy of as many bytes

Bytes are those that a kernel must read and write at least; others' kernels are counted with the bytes of ours. On a GPU
CUDA events time five calls in a row; on a CPU it is one thread's CPU time. Medians, all in turns. *Error*: mean
difference of decoded values over their mean size.
"""

import importlib
import importlib.util
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .kernels import CASES, Case
from .measure import interleave, medians_ms, print_tables, table_of, timer_of
from .muon import MODELS, flops_of
from .optimizers import OFF

Call = Callable[[], Any]
Calls = dict[str, Call]
Row = dict[str, Any]
STEPS = tuple(case for case in CASES if case.tile and not case.scalar and len(set(case.dtypes)) == 1)
OURS = ("block_optim, standard", "block_optim", "dbuffer")
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
    from block_optim import orthogonalize

    unit, half = unit_of(device, tiny), torch.float16 if device == "cuda" else torch.float32
    large, products = 32 * unit, {}
    for dtype in (torch.bfloat16, half):
        a = torch.randn(large, large, device=device).to(dtype)
        products[f"product, {str(dtype)[6:]}"] = partial(torch.mm, a, a, out=torch.empty_like(a))
    same, other = products
    function = getattr(importlib.import_module("torch.optim._muon"), "_zeropower_via_newtonschulz", None)
    for n, rows, columns in STACKS:
        stack = torch.randn(n, rows * unit, columns * unit, device=device).bfloat16()
        flops = partial(flops_of, rows * unit, columns * unit, stack.device)
        standard, gram = n * flops("standard"), n * flops("gram")
        turns = {name: Turn(call, 2.0 * large**3, name) for name, call in products.items()}
        turns["block_optim, standard"] = Turn(partial(orthogonalize, stack), standard, same)
        if gram < standard:  # else it is not used
            turns["block_optim, gram"] = Turn(partial(orthogonalize, stack, method="gram"), gram, other)
        if function is not None:  # a private function of torch, which some releases lack
            matrices = list(stack.clone())  # it normalizes bf16 matrices in place
            turns["torch.optim.Muon's"] = Turn(partial(_each, function, matrices), standard, same)
        yield from rated("Newton-Schulz", f"{n} x {rows * unit}x{columns * unit}", turns, device)


def _each(function: Any, matrices: list[Any]) -> None:
    for matrix in matrices:
        function(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)


def adamw_steps(device: str, tiny: bool, missing: dict[str, str]) -> Iterator[Row]:
    """Rows of a layer's matrices, for the representatives of `bench kernels`."""
    from block_optim import AdamW8bit
    from layout_planner import Elements, Tile

    unit, (_, shapes) = unit_of(device, tiny), MODELS["llama-3-8b"]

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
        optimizer = AdamW8bit(params(case), block=block, stochastic_rounding=case.rounds, **OFF)
        calls: Calls = {"block_optim": optimizer.step}
        calls |= others(case.name, missing, partial(params, case), case)
        nbytes = case.bytes_moved * sum(param.numel() for param in optimizer.param_groups[0]["params"])
        yield from moving("8-bit AdamW", case.name, calls, nbytes, device)


def decoders(device: str, tiny: bool, missing: dict[str, str]) -> Iterator[Row]:
    """Rows of formats whose codes are read back as bf16."""
    from dbuffer import BlockFormat, BlockFP8, BlockNF4, BlockNVFP4, RowRun

    unit = unit_of(device, tiny)
    x = torch.randn(16 * unit, 64 * unit, device=device).bfloat16()
    formats: dict[str, BlockFormat] = {
        "fp8 128x128": BlockFP8((128, 128)), "fp8 32x32": BlockFP8((32, 32)),
        "mxfp8 rows": BlockFP8((1, 32), "e8m0"), "mxfp8 columns": BlockFP8((32, 1), "e8m0"),
        "nvfp4": BlockNVFP4("row"), "nf4": BlockNF4(64),
    }  # fmt: skip
    for case, form in formats.items():
        run = RowRun(form.grid(x.shape), 0, len(x))
        codes = torch.empty(len(x) * form.code_bytes(x.shape[1]), dtype=torch.uint8, device=device)
        scales = torch.empty(run.num_scales, dtype=form.scale_dtype, device=device)
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


def measure(request: dict[str, Any]) -> dict[str, Any]:
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


def table(answer: dict[str, Any]) -> dict[str, Any]:
    """The table of `measure`."""
    text = "Of: a copy of as many bytes, or a large product in the same dtype."
    text += "".join(f" {name}: {why}." for name, why in answer["missing"].items())
    rows = [
        [row["kernel"], row["case"], row["by"], f"{row['ms']:.3f}", rate_of(row), f"{row['share']:.2f}",
         f"{row['error']:.3f}" if "error" in row else ""]
        for row in answer["rates"]
    ]  # fmt: skip
    return table_of("Rates of kernels", text, "kernel; case; by; ms; rate; of; error", rows)


def main(parser: ArgumentParser, arguments: list[str]) -> int:
    """Print the table."""
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the path")
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print_tables([table(measure({"device": device, "tiny": parser.parse_args(arguments).tiny}))])
    return 0

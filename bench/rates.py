# mypy: disable-error-code="import-untyped, import-not-found"
"""Rates of kernels, compared with a copy, a large product, and others' kernels.

python -m bench rates [--tiny]

TFLOP/s of Newton-Schulz (of: a product in the same dtype), GB/s of 8-bit AdamW's step and of decoding FP8 and NF4 to
bf16 (of: a copy of as many bytes). Bytes are those that a kernel must read and write at least; others' kernels are
counted with the bytes of ours. On a GPU CUDA events time five calls in a row; on a CPU it is one thread's CPU time.
Medians, all in turns. *Error*: mean difference of decoded values over their mean size.
"""

import importlib
import importlib.util
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from block_optim.muon.newton_schulz import flops_of, orthogonalize, steps_of
from dbuffer.encodings import BlockFP8, BlockNF4, RowRun
from layout_planner import Elements, Tile

from .measure import interleave, medians_ms, print_tables, table_of, timer_of
from .optimizers import LLAMAS, unchecked

Call = Callable[[], Any]
Calls = dict[str, Call]
Row = dict[str, Any]
OURS = ("block_optim", "dbuffer")
STACKS = ((1, 16, 16), (1, 4, 16), (1, 56, 16), (8, 4, 4))  # matrices, rows, columns, in units
FORMATS = {"fp8 128x128": BlockFP8((128, 128)), "fp8 32x32": BlockFP8((32, 32)), "nf4": BlockNF4(64)}


@dataclass(frozen=True)
class Step:
    """A step of 8-bit AdamW: blocks, dtype of parameters and gradients, and whether they are rounded stochastically."""

    block: Any
    dtype: torch.dtype
    rounds: bool = False

    @property
    def bytes_moved(self) -> float:
        """Bytes an element, each tensor read and written once: parameter, gradient, two codes; scales included."""
        numel = self.block.count if isinstance(self.block, Elements) else self.block.rows * self.block.columns
        return 3 * self.dtype.itemsize + 4 + 16 / numel


STEPS = {
    "elements:256 fp32": Step(Elements(256), torch.float32),
    "elements:256 bf16": Step(Elements(256), torch.bfloat16),
    "elements:256 bf16 stochastic": Step(Elements(256), torch.bfloat16, rounds=True),
    "tile:32x32 bf16": Step(Tile(32, 32), torch.bfloat16),
    "tile:128x128 bf16": Step(Tile(128, 128), torch.bfloat16),
}


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


def torchao_step(params: Callable[[], list[Any]], step: Step) -> Call:
    """A step of torchao's AdamW8bit."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(params(), block_size=256, bf16_stochastic_round=step.rounds).step


def bitsandbytes_step(params: Callable[[], list[Any]], step: Step) -> Call:
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
        flops = n * flops_of(rows * unit, columns * unit, steps_of("keller"))
        turns = {same: Turn(product, 2.0 * large**3, same)}
        turns["block_optim"] = Turn(partial(_each, orthogonalize, matrices), flops, same)
        if function is not None:  # a private function of torch, which some releases lack
            copies = [m.clone() for m in matrices]  # it normalizes bf16 matrices in place
            call = partial(_each, function, copies, (3.4445, -4.775, 2.0315), 5, 1e-7)
            turns["torch.optim.Muon's"] = Turn(call, flops, same)
        yield from rated("Newton-Schulz", f"{n} x {rows * unit}x{columns * unit}", turns, device)


def _each(function: Callable[..., Any], matrices: list[Any], *args: Any) -> None:
    for matrix in matrices:
        function(matrix, *args)


def adamw_steps(device: str, tiny: bool, missing: dict[str, str]) -> Iterator[Row]:
    """Rows of a layer's matrices."""
    from block_optim import AdamW8bit

    unit, (_, shapes) = unit_of(device, tiny), LLAMAS["llama-3-8b"]

    def params(dtype: torch.dtype) -> list[Any]:
        made = []
        for rows, columns in shapes:
            shape = rows * unit // 256, columns * unit // 256
            made.append(torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)))
            made[-1].grad = torch.randn_like(made[-1])
        return made

    for name, step in STEPS.items():
        optimizer = unchecked(
            AdamW8bit, params(step.dtype), block=step.block, stochastic_rounding=step.rounds
        )
        calls: Calls = {"block_optim": optimizer.step}
        calls |= others(name, missing, partial(params, step.dtype), step)
        nbytes = step.bytes_moved * sum(param.numel() for param in optimizer.param_groups[0]["params"])
        yield from moving("8-bit AdamW", name, calls, nbytes, device)


def decoders(device: str, tiny: bool, missing: dict[str, str]) -> Iterator[Row]:
    """Rows of formats whose codes are read back as bf16."""
    unit = unit_of(device, tiny)
    x = torch.randn(16 * unit, 64 * unit, device=device).bfloat16()
    for case, form in FORMATS.items():
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

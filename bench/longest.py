"""The longest context of an 8B full fine-tune: AdamW8bit on `fsdp_runtime.fully_shard`, torch's AdamW on FSDP2.

A piece of `gpu.py` for each side. The model has the layers of Llama-3-8B and random weights; every side computes in
bf16, reduces gradients in fp32, and recomputes each block in backward. One sequence on each rank; the loss is taken of
all logits in fp32. A context fits if two steps do, the second with all states of the optimizer in memory. Each trial
has new processes, so that one that ran out of memory leaves nothing behind.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .measure import timer_of

SHAPE: dict[str, Any] = {
    "vocab_size": 128256, "dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ff_dim": 14336,
    "rope_theta": 5e5,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "dim": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ff_dim": 96,
}
OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "ALLOC_FAILED")
FINER = 8  # the search ends with a context that is too long by an eighth or less


@dataclass(frozen=True)
class Side:
    """One of those compared.

    Attributes:
        system: name in `fsdp_runtime.train.systems`.
        dtype: of parameters and gradients between steps.
        about: which optimizer, and the bytes that a parameter takes with its gradient and states.
    """

    system: Any
    dtype: str
    about: str


SIDES = {
    "fsdp2": Side("fsdp2", "float32", "torch.optim.AdamW, fp32 parameters and states: 16 bytes a parameter"),
    "fsdp2-bf16": Side("fsdp2", "bfloat16", "torch.optim.AdamW, bf16 parameters and states: 8 bytes a parameter"),
    "ours": Side("fsdp_runtime", "bfloat16",
                 "AdamW8bit, bf16 parameters, rounded stochastically: 6 bytes a parameter, 12 in the embedding"),
}  # fmt: skip


def build(side: Side, sizes: dict[str, Any], device: str, mesh: Any) -> tuple[Any, Any]:
    """The sharded model with random weights, and its optimizer."""
    from block_optim import AdamW8bit, local_of
    from fsdp_runtime.train import ModelConfig, RunConfig, Transformer
    from fsdp_runtime.train.systems import make_system

    def start(model: Any) -> Any:
        model.to_empty(device=device)
        with torch.no_grad():
            for name, param in model.named_parameters():
                local = local_of(param)
                local.fill_(1.0) if "norm" in name else local.normal_(std=0.02)
        if side.system == "fsdp2":
            return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return AdamW8bit(model.named_parameters(), lr=1e-4, stochastic_rounding=True)

    optimizer = "torch-adamw" if side.system == "fsdp2" else "adamw8bit"  # whose blocks are not cut
    config = RunConfig(system=side.system, optimizer=optimizer, precision="bf16", batch=mesh.size(), clip=0.0)
    with torch.device("meta"):
        model = Transformer(ModelConfig(**sizes, tied=False), checkpointing=True)
    model.to(getattr(torch, side.dtype))
    return make_system(config, torch.device(device), mesh).build(model, None, start)


def trained(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step with sequences of `request["length"]` tokens, and peaks of memory.

    Raises:
        torch.OutOfMemoryError: the context does not fit.
    """
    from fsdp_runtime.train.model import losses_of

    from .compare import peaks

    length, device, sizes = request["length"], request["device"], request["sizes"]
    if length > request.get("pretended_limit", length):
        raise torch.OutOfMemoryError(f"a dry run pretends that {length} tokens are out of memory")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model, optimizer = build(SIDES[request["side"]], sizes, device, mesh)
    tokens = torch.randint(sizes["vocab_size"], (1, length + 1), device=device)

    def step() -> None:
        losses_of(model, tokens[:, :-1], tokens[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times = [timer_of(device)(step) for _ in range(1 + request["steps"])][1:]
    out = {"length": length, "seconds": statistics.median(times), **peaks(device)}
    out["tokens_per_second"] = length * mesh.size() / out["seconds"]
    dist.destroy_process_group()  # which also ends this process after the call, and so frees its memory
    return out


# -- in the process that starts the ranks ------------------------------------------------------------------------------


def search(trial: Callable[[int], Any | None], least: int, most: int) -> tuple[Any | None, int | None]:
    """Find the longest context that fits, by doubling, then by halving the gap.

    Args:
        trial: returns a sample of a length, None where it does not fit; raises TimeoutError where no time is left.
        least: first length, of which all are multiples.
        most: largest length to try.

    Returns:
        The sample of the longest that fits, and the shortest that does not; None if there is none.
    """
    length, fits, best, over = least, 0, None, None
    while length <= most:
        try:
            sample = trial(length)
        except TimeoutError:
            break
        if sample is None:
            over = length
        else:
            best, fits = sample, length
        if over is None:
            length *= 2
            continue
        length = (fits + over) // 2 // least * least
        if length <= fits or (over - fits) * FINER <= fits:
            break
    return best, over


def out_of_memory(error: Any) -> str | None:
    """The cause of a `RankError` if a device's memory was full, else None."""
    causes = map(repr, error.causes.values())
    return next((cause for cause in causes if any(word in cause for word in OUT_OF_MEMORY)), None)


def run_side(ranks: int, request: dict[str, Any], limit: float) -> dict[str, Any]:
    """The longest context of a side, with all trials; `request` as of `trained`, with `least` and `most` lengths.

    Takes no more than `limit` seconds: with less left than twice the last trial took, the search ends where it is.
    """
    from ragged_shard.testing import RankError, run_ranks, shut_down

    began = [time.monotonic()]  # of each trial, and of the next
    end, trials = began[0] + limit, list[dict[str, Any]]()

    def trial(length: int) -> dict[str, Any] | None:
        left, asked = end - began[-1], {**request, "length": length}
        if trials and left < 2 * (began[-1] - began[-2]):
            raise TimeoutError
        try:
            sample, *_ = run_ranks(ranks, trained, asked, timeout=left, device=request["device"], seed=0)
        except RankError as error:
            if trials and time.monotonic() >= end:
                raise TimeoutError from error
            if (cause := out_of_memory(error)) is None:
                raise
            sample, failed = None, {"length": length, "out_of_memory": cause}
        began.append(time.monotonic())
        trials.append(sample or failed)
        return sample

    shut_down()
    try:
        best, over = search(trial, request["least"], request["most"])
    finally:
        shut_down()
    side = SIDES[request["side"]]
    about = {"compared": __doc__, "about": side.about, "parameters": side.dtype, "ranks": ranks}
    about |= {key: request[key] for key in ("side", "sizes")}
    answer = {**about, "fits": best is not None, "longest": best, "too_long": over, "trials": trials}
    return {**answer, "line": line_of(answer)}


HEADER = "world and side; optimizer; ranks; layers; longest that fits; does not fit; tokens/s; peak GiB"
ABOUT = (
    "Tokens of one sequence on each rank, layers of Llama-3-8B, computed in bf16, blocks recomputed in backward;"
    " tokens/s and reserved memory with the longest."
)


def row_of(name: str, answer: dict[str, Any]) -> list[str]:
    """The piece's row under HEADER."""
    best, over = answer["longest"], answer["too_long"]
    row = [name, answer["about"], str(answer["ranks"]), str(answer["sizes"]["num_layers"])]
    too_long = f"{over:,}" if over else "not searched further"
    if best is None:
        return [*row, "none: out of memory", too_long, "", ""]
    peak = best.get("cuda_reserved", best["start"]) / 2**30
    return [*row, f"{best['length']:,}", too_long, f"{best['tokens_per_second']:,.0f}", f"{peak:.1f}"]


def line_of(answer: dict[str, Any]) -> str:
    """The result in a line."""
    cells = zip(HEADER.split("; ")[2:], row_of("", answer)[2:], strict=True)
    return "; ".join(f"{name} {cell}" for name, cell in cells if cell)

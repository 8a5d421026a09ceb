"""Whole weights, or what one small step changed, out of a sharded model: bytes and memory of each way.

python -m bench export [--ranks 2 4] [--width 512] [--layers 8] [--lr 1e-6]

Linear layers with fp32 shards on gloo ranks make one AdamW step; then each way exports bf16. Bytes are those that all
ranks send, memory is a rank's most in tensors beyond its shards and its copy of the last export.
"""

from typing import Any

from .measure import launch, mib, parser_of, table

WAYS = {
    "full_tensor": "full_tensor() of each parameter",
    "whole": "iter_full_params",
    "rank 0": "iter_full_params(ranks=(0,))",
    "blocks": "iter_full_params(ranks=(0,), changed_since=), rows",
    "elements": "weight_patches, elements",
}


def run(request: dict[str, Any]) -> dict[str, Any]:
    """On a rank: bytes, memory and values that each way exports after the step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from fsdp_runtime import fully_shard, iter_full_params
    from fsdp_runtime.checkpoint import ExportedParams
    from fsdp_runtime.checkpoint.export import Exporter
    from ragged_shard.testing import record_collectives, record_memory

    torch.manual_seed(0)
    width, bf16 = request["width"], torch.bfloat16
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(request["layers"])))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    blocks, elements = ExportedParams(), ExportedParams()

    def values_of(way: str) -> int:
        if way == "full_tensor":
            full: Any = model.parameters()
            return sum(param.full_tensor().to(bf16).numel() for param in full)
        options: dict[str, Any] = {"dtype": bf16, "bucket_bytes": 1 << 22}
        if way == "whole":
            return sum(tensor.numel() for _, tensor in iter_full_params(model, **options))
        if way == "rank 0":
            return sum(tensor.numel() for _, tensor in iter_full_params(model, ranks=(0,), **options))
        if way == "blocks":
            changed = iter_full_params(model, ranks=(0,), changed_since=blocks, **options)
            return sum(one.values.numel() for one in changed)
        exporter = Exporter(model, bf16, 1 << 22, (0,), buffers=True)
        return sum(one.values.numel() for one in exporter.elements(elements))

    for way in ("blocks", "elements"):
        values_of(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=request["lr"])
    model(torch.randn(8, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    results: dict[str, Any] = {"total": sum(param.numel() for param in model.parameters())}
    for way in WAYS:
        with record_collectives() as sent, record_memory() as live:
            count = values_of(way)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (sent.bytes_sent, live.peak))
        results[way] = (sum(b for b, _ in every), max(peak for _, peak in every), count)
    return results


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = parser_of("export", "Whole weights, or what one small step changed: bytes and peak memory.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-6)
    options = parser.parse_args(arguments)
    rows = []
    for ranks in options.ranks:
        results = launch(run, ranks, vars(options))
        total = results.pop("total")
        for way, (sent, peak, count) in results.items():
            rows.append(
                [ranks, WAYS[way], f"{sent / 2**20:.2f}", f"{peak / 2**20:.1f}", f"{1 - count / total:.2%}"]
            )
    print(f"{total / 1e6:.2f}M parameters, {mib(2 * total)} MiB in bf16, one AdamW step of lr {options.lr}")
    print(table(["ranks", "way", "MiB sent", "peak MiB", "values not sent"], rows))
    return 0

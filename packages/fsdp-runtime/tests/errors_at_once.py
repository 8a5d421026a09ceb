"""When does each rank learn of an error on one of them? Prints a line of JSON for each case.

    python errors_at_once.py [RANKS PLACE PASS raise|kill] ...      by default all cases

Ranks are forked, one set after the other. The process group's timeout is far longer than a case, so that an error that
waits for it cannot be taken for one that comes at once. `seconds` are from the error on rank 1 to the exception that
ends each rank's program, and to the end of its process.
"""

import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.checkpoint import checkpoint

from block_optim import Muon
from fsdp_runtime import (
    fully_shard,
    get_full_state_dict,
    iter_full_params,
    register_fsdp_forward_method,
    set_full_state_dict,
)

TIMEOUT, LIMIT = timedelta(minutes=10), 60.0  # of the process group; seconds after which ranks are killed
BAD = 1  # the rank with the error
PLACES = (
    "forward", "pre-hook", "hook", "last hook", "backward", "recomputation", "step", "evaluation",
    "save", "load", "export", "gradient hook", "method",
)  # fmt: skip
CASES = [*itertools.product((2, 3), PLACES, (0, 1, 4), ("raise", "kill"))]


class Trouble:
    """Raises or kills at one place, in one pass, on one rank."""

    def __init__(self, place: str, number: int, how: str, note: Path) -> None:
        self.place, self.number, self.how, self.note = place, number, how, note
        self.now = -1

    def __call__(self, place: str) -> None:
        """Called at each place."""
        if (place, self.now) == (self.place, self.number) and dist.get_rank() == BAD:
            self.note.write_text(str(time.monotonic()))
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad batch")


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, trouble: Trouble) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.trouble = trouble

    def forward(self, x):
        if self.trouble.place == "recomputation" and torch._C._current_graph_task_id() != -1:
            self.trouble("recomputation")
        x = x + self.down(torch.relu(self.up(x)))
        self.trouble("forward" if torch.is_grad_enabled() else "evaluation")
        return x


class Net(nn.Module):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        quiet = Trouble("", 0, "", trouble.note)
        hidden = (8, 8, 40_000, 8, 8)  # the third is large enough for peer memory
        self.blocks: Any = nn.ModuleList(
            Block(8, size, trouble if index == 1 else quiet) for index, size in enumerate(hidden)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
        return self.head(x)

    def encode(self, x):
        out = self(x)
        self.blocks[1].trouble("method")
        return out


def train(trouble: Trouble, folder: Path) -> None:
    torch.manual_seed(0)
    model = Net(trouble)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    second = model.blocks[1]
    second.register_forward_pre_hook(lambda *_: trouble("pre-hook"))
    second.register_forward_hook(lambda *_: trouble("hook"))
    model.register_forward_hook(lambda *_: trouble("last hook"))
    second.up.weight.register_post_accumulate_grad_hook(lambda _: trouble("gradient hook"))
    optimizer = Muon([(n, p) for n, p in model.named_parameters() if p.ndim == 2], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: trouble("step"))

    class Writer(dcp.FileSystemWriter):
        def write_data(self, *args):
            trouble("save")
            return super().write_data(*args)

    for number in range(6):
        trouble.now = number
        x = torch.ones(2, 8)
        out = model.encode(x) if trouble.place == "method" else model(x)
        out.register_hook(lambda _: trouble("backward"))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if trouble.place == "evaluation":
            with torch.no_grad():
                model(x)
        elif trouble.place == "save":
            dcp.save({"model": get_model_state_dict(model)}, storage_writer=Writer(folder / str(number)))
        elif trouble.place == "load":
            state = get_full_state_dict(model)
            trouble("load")
            set_full_state_dict(model, state)
        elif trouble.place == "export":
            for _ in iter_full_params(model, bucket_bytes=1 << 10):
                trouble("export")


def rank_of(rank: int, ranks: int, folder: Path, trouble: Trouble) -> None:
    report = {"error": "", "at": 0.0}
    try:
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
        train(trouble, folder)
    except BaseException as error:  # DCP's does not derive from Exception
        report = {"error": f"{type(error).__name__}: {error}", "at": time.monotonic()}
    (folder / f"rank{rank}").write_text(json.dumps(report))


def run(ranks: int, place: str, number: int, how: str) -> dict:
    folder = Path(tempfile.mkdtemp())
    trouble = Trouble(place, number, how, folder / "note")
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            rank_of(rank, ranks, folder, trouble)
            sys.exit()  # finalizes the interpreter, as a user's program does
        children[child] = rank
    ended, limit = {}, time.monotonic() + LIMIT
    while children:
        child, _ = os.waitpid(-1, os.WNOHANG)
        if child:
            ended[children.pop(child)] = time.monotonic()
        elif time.monotonic() > limit:
            for child in children:
                os.kill(child, signal.SIGKILL)
            limit += LIMIT
        else:
            time.sleep(0.01)
    start = float((folder / "note").read_text()) if (folder / "note").exists() else float("nan")
    case: dict[str, Any] = {
        "ranks": ranks,
        "place": place,
        "pass": number,
        "how": how,
        "errors": [],
        "seconds": [],
        "ended": [],
    }
    for rank in range(ranks):
        path = folder / f"rank{rank}"
        killed = {"error": "killed", "at": ended[rank]}
        report: Any = json.loads(path.read_text()) if path.exists() else killed
        case["errors"].append(report["error"])
        case["seconds"].append(round(report["at"] - start, 2))
        case["ended"].append(round(ended[rank] - start, 2))
    shutil.rmtree(folder)
    return case


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    cases = [(int(r), p, int(n), how) for r, p, n, how in (each.split(",") for each in wanted)] or CASES
    for case in cases:
        print(json.dumps(run(*case)), flush=True)

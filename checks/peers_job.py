"""One rank of the script that `peers.py` runs with every system: a small model, six steps, a fault on rank 1.

What is done for ours alone asks for `self.system`; the rest is the same for all.
"""

import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_runtime
from fsdp_runtime.train import RunConfig
from fsdp_runtime.train import checkpoint as ckpt
from fsdp_runtime.train.trainer import check_finite

STEPS, FAULT_AT, WIDTH = 6, 3, 16
TIMEOUT = 8.0  # seconds: of the process group
BEGUN = "begun"  # the file that says when the fault came


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        return self.down(torch.relu(self.up(x))).float()


class Net(nn.Module):
    """Three blocks; `order` is the order in which they run."""

    def __init__(self, hidden: int, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden if n == 1 else 32) for n in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = x + self.blocks[number](x)
        return self.head(x)


class Job:
    """The script on this rank. `fault` is one of `peers.FAULTS`; `odd`: this is the rank that has it."""

    def __init__(self, system: str, fault: str, folder: Path) -> None:
        self.system, self.fault, self.folder = system, fault, folder
        self.rank = dist.get_rank()
        self.odd = self.rank == 1
        torch.manual_seed(0)
        if self.odd:
            (folder / BEGUN).touch()  # again in training, where the fault comes later
        hidden = 48 if self.odd and fault == "another width" else 32
        order = (1, 0, 2) if self.odd and fault == "another order" else (0, 1, 2)
        self.net = Net(hidden, order)
        if self.odd and fault == "another dtype":
            self.net.blocks[1].to(torch.bfloat16)
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = self._sharded()

    def _sharded(self) -> tuple[Any, Any]:
        if self.system == "deepspeed":
            return _deepspeed(self.net)
        shard: Any = fsdp_runtime.fully_shard if self.system == "ours" else dist.fsdp.fully_shard
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.net.blocks:
            shard(block, mesh=mesh)
        shard(self.net, mesh=mesh)
        return self.net, torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def train(self) -> float:
        """Six steps; the mean loss of the last. The fault comes before the fourth."""
        mean = 0.0
        for step in range(STEPS):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + self.rank))
            if step == FAULT_AT and self.odd:
                self._fail(x)
            loss = self._step(x)
            total = loss.clone()
            dist.all_reduce(total)
            mean = float(total) / dist.get_world_size()
            if self.system == "ours":
                check_finite(step, mean, 0.0)
        return mean

    def _fail(self, x: torch.Tensor) -> None:
        (self.folder / BEGUN).touch()
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "stuck":
            time.sleep(1000)  # reads data that does not come
        if self.fault == "NaN":
            x[0, 0] = float("nan")

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        if self.system == "deepspeed":
            self.model.backward(loss)
            self.model.step()
            return loss.detach()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def save(self) -> None:
        """Write a checkpoint, as the system's documentation says."""
        folder = self.folder / "checkpoint"
        if self.system == "deepspeed":
            self.model.save_checkpoint(str(folder), tag="last")
            return
        if self.system == "ours":
            about = {"config": RunConfig().to_json(), "data": "", "step": STEPS}
            ckpt.save(folder, self.net, self.optimizer, about, keep=1)
            return
        dcp.save({"model": self.net.state_dict()}, storage_writer=dcp.FileSystemWriter(folder))

    def load(self) -> None:
        folder = self.folder / "checkpoint"
        if self.system == "deepspeed":
            self.model.load_checkpoint(str(folder), tag="last")
            return
        if self.system == "ours":
            newest = ckpt.latest(folder)
            assert newest is not None
            ckpt.load(newest, self.net, self.optimizer)
            return
        state = {"model": self.net.state_dict()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        self.net.load_state_dict(state["model"])

    def weights(self) -> list[list[float]]:
        if self.system == "deepspeed":
            import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]

            with deepspeed.zero.GatheredParameters(list(self.net.parameters())):
                return [p.detach().flatten().tolist() for p in self.net.parameters()]
        params: list[Any] = list(self.net.parameters())
        whole = [p.full_tensor() for p in params]
        return [value.detach().flatten().tolist() for value in whole]


def _deepspeed(net: nn.Module) -> tuple[Any, Any]:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, made, _, _ = deepspeed.initialize(
        model=net, optimizer=optimizer, config=settings, dist_init_required=False
    )
    return engine, made


def run_rank(system: str, fault: str, folder: Path, rank: int, world_size: int, doing: str) -> None:
    """Be a rank: train, save or load; leave what came of it in a file, and end."""
    warnings.filterwarnings("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), DS_ACCELERATOR="cpu")
    outcome: dict[str, Any] = {"rank": rank, "error": None}
    try:
        allowed = timedelta(seconds=60.0 if fault == "none" else TIMEOUT)
        where = f"file://{folder / f'store-{doing}'}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size, timeout=allowed)
        job = Job(system, fault, folder)
        if doing == "load":
            job.load()
        else:
            outcome["loss"] = job.train()
        if doing == "save":
            job.save()
        if doing != "train":
            outcome["weights"] = job.weights()
    except BaseException as error:
        outcome["error"] = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
    outcome["at"] = time.time()
    (folder / f"{rank}.part").write_text(json.dumps(outcome))
    (folder / f"{rank}.part").rename(folder / f"{doing}-{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

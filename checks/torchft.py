"""Two replicas of two sharded ranks under torchft's manager; one replica is killed, and comes back with other weights.

    replica 0   ranks 0, 1: fully_shard over the two     set_all_reduce_hook -> manager.allreduce -> replica 1
    replica 1   the same, in a job of its own            killed, started again: the manager gives it replica 0's state

All ranks must end with the same bits, near the weights of one process that reads the same batches.
"""

import copy
import json
import os
import signal
import socket
import tempfile
import time
from datetime import timedelta
from itertools import chain, groupby, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found,import-untyped,unused-ignore]

from fsdp_runtime import fully_shard

REPLICAS, RANKS, WIDTH = 2, 2, 8
TOGETHER = 3  # steps of both replicas before one is killed, and after it has come back
RETURNED = "returned"  # the file that says that replica 1 is started again
_WAIT = timedelta(seconds=30)


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def batch(step: int, replica: int, rank: int) -> torch.Tensor:
    seed = (step * REPLICAS + replica) * RANKS + rank
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Has state, which must travel too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Replica:
    """One rank of a replica, with the manager's hooks on its units."""

    def __init__(self, replica: int, rank: int, lighthouse: str, seed: int) -> None:
        self.replica, self.rank = replica, rank
        mesh = init_device_mesh("cpu", (RANKS,))
        self.model: Any = model_of(seed)
        units = [fully_shard(layer, mesh=mesh) for layer in (self.model[0], self.model[2])]
        self.inner = optimizer_of(self.model)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=self.load, state_dict=self.state,
            min_replica_size=1, replica_id=f"replica-{replica}", lighthouse_addr=lighthouse, timeout=_WAIT,
            quorum_timeout=_WAIT, connect_timeout=_WAIT, hostname="127.0.0.1",
        )  # fmt: skip
        self.optimizer = Optimizer(self.manager, self.inner)
        for unit in units:
            unit.set_all_reduce_hook(self._across_replicas)
        self.participants: list[int] = []  # of each step that was committed here

    def _across_replicas(self, flat: torch.Tensor) -> None:
        self.manager.allreduce(flat).wait()

    def state(self) -> dict[str, Any]:
        """What a replica that comes back is given: this rank's shards and states, copied."""
        shards = {name: _local(value) for name, value in self.model.state_dict().items()}
        states = [{k: _local(v) for k, v in s.items()} for s in self.inner.state_dict()["state"].values()]
        return copy.deepcopy({"model": shards, "optimizer": states})

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.to_local().copy_(state["model"][name])
        given = {}
        for number, (param, mine) in enumerate(
            zip(self.model.parameters(), state["optimizer"], strict=False)
        ):
            given[number] = {k: _as_shard(v, param) for k, v in mine.items()}
        self.inner.load_state_dict({**self.inner.state_dict(), "state": given})

    def step(self) -> bool:
        number = self.manager.current_step()
        self.optimizer.zero_grad()
        self.model(batch(number, self.replica, self.rank)).square().mean().backward()
        self.optimizer.step()
        if self.manager.current_step() == number:
            return False
        self.participants.append(self.manager.num_participants())
        return True


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _as_shard(value: Any, param: Any) -> Any:
    """A state of the shape of its shard becomes a distributed tensor again."""
    if not isinstance(value, torch.Tensor) or value.shape != param.to_local().shape or not value.dim():
        return value
    whole: Any = torch.zeros_like(param)
    whole.to_local().copy_(value)
    return whole


def run_rank(folder: Path, replica: int, rank: int, port: int, lighthouse: str, life: int) -> None:
    """Train until both replicas have trained together again, and leave what came of it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mine = Replica(
        replica, rank, lighthouse, seed=100 * life
    )  # who comes back has other weights until it is given some
    together = 0
    while together < TOGETHER:
        returned = (folder / RETURNED).exists()
        if mine.step() and returned:
            together += mine.participants[-1] == REPLICAS
        (folder / f"steps-{replica}-{rank}").write_text(json.dumps(mine.participants))
    whole: list[Any] = [param.full_tensor() for param in mine.model.parameters()]
    weights = [value.detach().flatten().tolist() for value in whole]
    result = {"participants": mine.participants, "step": mine.manager.current_step(), "weights": weights}
    (folder / f"{replica}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)


def start(folder: Path, replica: int, lighthouse: str, life: int) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = []
    for rank in range(RANKS):
        if (pid := os.fork()) == 0:
            log = os.open(folder / f"log-{replica}-{life}-{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                run_rank(folder, replica, rank, port, lighthouse, life)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        found.append(pid)
    return found


def serve(folder: Path) -> int:
    """Fork the lighthouse, which has threads: this process must have none. Its address is in a file."""
    if (pid := os.fork()) == 0:
        server = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=2000
        )
        (folder / "address.part").write_text(server.address())
        (folder / "address.part").rename(folder / "address")
        signal.pause()
    return pid


def steps_of(folder: Path, replica: int) -> list[int]:
    """How many replicas took part in each step of a replica so far."""
    try:
        return json.loads((folder / f"steps-{replica}-0").read_text())
    except (OSError, ValueError):
        return []


def wait_for(happened: Any, what: str, seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"no {what} within {seconds:g} s"
        time.sleep(0.05)


def train(folder: Path) -> None:
    """Train, kill replica 1, start it again, and wait for the end."""
    torch.optim.AdamW([torch.zeros(1)])  # torch.compile's modules, once for all ranks
    running = {-1: [serve(folder)]}
    try:
        wait_for((folder / "address").exists, "lighthouse")
        lighthouse = (folder / "address").read_text()
        running[0] = start(folder, 0, lighthouse, 0)
        wait_for(lambda: steps_of(folder, 0), "first step")
        running[1] = start(folder, 1, lighthouse, 0)
        wait_for(lambda: steps_of(folder, 0).count(REPLICAS) >= TOGETHER, "steps of both replicas")
        for pid in running.pop(1):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        wait_for(lambda: steps_of(folder, 0)[-1:] == [1], "step of one replica alone")
        (folder / RETURNED).touch()
        running[1] = start(folder, 1, lighthouse, 1)
        wait_for(lambda: len(list(folder.glob("*-*.json"))) == REPLICAS * RANKS, "end")
    finally:
        for pid in (pid for pids in running.values() for pid in pids):
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


def replayed(participants: list[int]) -> list[float]:
    """The weights of one process that reads what the replicas read; replica 0 takes part in every step."""
    model = model_of(0)
    optimizer = optimizer_of(model)
    for step, replicas in enumerate(participants):
        for replica, rank in product(range(replicas), range(RANKS)):
            loss = model(batch(step, replica, rank)).square().mean()
            (loss / (replicas * RANKS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


def check(folder: Path) -> None:
    """Compare the ranks' results with each other and with one process."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))]
    stayed, back = results[0], results[RANKS]
    changes = [count for count, _ in groupby(stayed["participants"])]
    assert changes == [1, 2, 1, 2], f"replicas that took part: {stayed['participants']}"
    assert len(back["participants"]) < len(stayed["participants"])
    for result in results:
        assert (result["step"], result["weights"]) == (stayed["step"], stayed["weights"])
    wanted = torch.tensor(replayed(stayed["participants"]))
    torch.testing.assert_close(torch.tensor(list(chain(*stayed["weights"]))), wanted, rtol=1e-4, atol=1e-6)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="torchft-") as name:
        train(Path(name))
        check(Path(name))


if __name__ == "__main__":
    main()

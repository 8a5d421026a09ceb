"""Ranks on two hosts: which transport they choose, that they train alike, and what is said when a host is cut off.

The short form of `nox -s "nightly(multihost)"`: no torchrun; one process per host imports torch and forks its ranks.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools.multihost.hosts import SHARED, Hosts, obstacle

WHY_NOT = obstacle()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"hosts need network namespaces: {WHY_NOT}"),
]

# Host n of two runs ranks 2n and 2n + 1. They train, say which transports they use, and go on until the link is cut.
RANKS = """
import json, logging, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from fsdp_runtime import Watchdog, fully_shard
from fsdp_runtime.train.errors import failed_collective, this_rank

host, shared = int(sys.argv[1]), sys.argv[2]
rank = 2 * host + (os.fork() == 0)
os.environ.update(WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
said = {"chosen": [], "reports": []}

class Chosen(logging.Handler):
    def emit(self, record):
        said["chosen"].append(record.getMessage())

logging.getLogger("dbuffer.transport").addHandler(Chosen())
logging.getLogger("dbuffer.transport").setLevel(logging.INFO)
store = dist.TCPStore("alpha", 29600, 4, rank == 0, timeout=timedelta(seconds=100))  # returns when all are there
own = dist.PrefixStore("ranks", store)
dist.init_process_group("gloo", store=own, rank=rank, world_size=4, timeout=timedelta(seconds=60))

def train(mesh, steps, group=None):
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(768, 768, bias=False), mesh=mesh)  # 2.25 MiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 768, generator=torch.Generator().manual_seed(1))[rank : rank + 1]
    for step in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        yield float(total) / 4

inside = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
said["hybrid"] = list(train(inside, 3))
everywhere = init_device_mesh("cpu", (4,))
said["sharded"] = list(train(everywhere, 3))
cut = dist.new_group(timeout=timedelta(seconds=6))  # the others may take as long as a busy machine does
mesh = DeviceMesh.from_group(cut, "cpu")
asked = dist.PrefixStore("watchdog", dist.TCPStore("alpha", 29600, is_master=False))
try:
    with Watchdog(asked, rank, 4, after=2, report=said["reports"].append) as watchdog:
        for step, _ in enumerate(train(mesh, 10**6, cut)):
            watchdog.beat(f"step {step}")
            if step == 3 and rank == 0:
                open(f"{shared}/trains", "w").close()
except RuntimeError as error:
    said["error"] = f"{this_rank(rank)}: {failed_collective(error)}: {error}"
with open(f"{shared}/{rank}.part", "w") as file:
    json.dump(said, file)
os.rename(f"{shared}/{rank}.part", f"{shared}/{rank}.json")
os._exit(0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each rank says; beta is cut off while they train."""
    folder = tmp_path_factory.mktemp("shared")
    with Hosts(["alpha", "beta"], folder) as hosts:
        running = [
            host.start([sys.executable, "-c", RANKS, str(n), str(SHARED)], folder / f"{host.name}.log")
            for n, host in enumerate(hosts)
        ]
        _wait(lambda: (folder / "trains").exists(), folder, running)
        hosts[1].link(down=True)
        _wait(lambda: len(list(folder.glob("*.json"))) == 4, folder, [])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def _wait(happened, folder, running, seconds=120.0):
    until = time.monotonic() + seconds
    while not happened():
        ended = [process.args for process in running if process.poll() is not None]
        logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
        assert not ended, logs
        assert time.monotonic() < until, logs
        time.sleep(0.1)


def test_ranks_of_one_host_read_each_others_memory_and_those_of_two_hosts_send(said):
    for rank in said:
        inside, across = rank["chosen"][0], rank["chosen"][-1]
        assert inside.endswith("peer_memory for large exchanges")
        assert "collectives; no peer memory" in across
        assert "another machine or another network namespace" in across


def test_ranks_of_two_hosts_train_alike_sharded_and_replicated(said):
    assert len(said[0]["sharded"]) == 3
    for rank in said:
        assert rank["sharded"] == pytest.approx(said[0]["hybrid"], rel=1e-5)


def test_a_host_that_is_cut_off_is_named_and_every_rank_ends_with_its_host_and_collective(said):
    for number, rank in enumerate(said):
        assert rank["error"].startswith(f"rank {number} ({'alpha' if number < 2 else 'beta'}): ")
        assert any(word in rank["error"] for word in ("all_gather", "all_reduce", "reduce_scatter"))
    asked = [line for rank in said[:2] for line in rank["reports"]]
    assert any(" s from ranks 2, 3 (beta): stopped, ended" in line for line in asked)
    for rank in said[2:]:  # the store is on alpha
        assert all("cannot be asked: the store has not answered" in line for line in rank["reports"])


def test_leaving_the_hosts_ends_all_that_ran_there_and_leaves_no_device(tmp_path):
    with Hosts(["alpha"], tmp_path) as (alpha,):
        running = alpha.start(["sleep", "60"], tmp_path / "log")
        _wait(lambda: alpha.processes(), tmp_path, [running])
        left = alpha.processes()
    running.wait(10)
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
    assert "tap0" not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout

"""One rank: receives jobs on its socket, runs them, and sends back results and errors."""

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ragged_shard._torch_compat import groups_by_name
from ragged_shard.device import CPU
from ragged_shard.testing import _pickling

serving = False  # whether this process is a rank
_meshes: dict[tuple[Any, ...], tuple[dist.ProcessGroup, DeviceMesh]] = {}  # and the default group of its time
_kept_groups: set[str] = set()  # groups of `_meshes`
_LIBRARIES = {"neighbors", "optimizer", "reductions"}  # descriptions of groups that are kept with a mesh's


def rank_mesh(*shape: int, names: tuple[str, ...] | None = None, device: str = CPU.type) -> DeviceMesh:
    """A mesh over all ranks: of this shape, by default one axis. In a rank, all jobs share it.

    A rank whose only process groups belong to such meshes, no two with an axis of the same name, can run another
    job. Others end with the job that made a group, because torch's caches confuse a mesh with an equal one of a job
    before: `mesh["tp"]` of one with `mesh["tp"]` of the other, which has another process group.
    """
    shape = shape or (dist.get_world_size(),)
    if not serving:
        return init_device_mesh(device, shape, mesh_dim_names=names)
    key = (device, shape, names)
    world = dist.group.WORLD
    assert world is not None
    # A job may have initialized torch.distributed again.
    if key not in _meshes or _meshes[key][0] is not world:
        before = set(groups_by_name())
        shares_axes = any(set(names or ()) & set(other or ()) for _, _, other in _meshes)
        _meshes[key] = world, init_device_mesh(device, shape, mesh_dim_names=names)
        if not shares_axes:
            _kept_groups.update(set(groups_by_name()) - before)
    return _meshes[key][1]


def main(fd: int, stacks: str) -> None:
    """Serve until the socket closes. Leaves by os._exit, since gloo may abort during a normal exit."""
    global serving
    serving = True
    out = open(stacks, "a+")  # noqa: SIM115  # faulthandler writes to it as long as the process lives
    faulthandler.enable(out)
    faulthandler.register(signal.SIGUSR1, out, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process handles Ctrl-C
    connection = Connection(socket.socket(fileno=fd).detach())
    try:
        setup = pickle.loads(connection.recv_bytes())
        _set_up(**setup)
        connection.send_bytes(pickle.dumps(("ready", None)))
        while True:
            connection.send_bytes(_run(connection.recv_bytes()))
    except (EOFError, OSError):
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps(("error", (None, traceback.format_exc()))))
    os._exit(0)


def _set_up(rank: int, world_size: int, store: str, device: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    on_cpu, backend = device == CPU.type, dist.get_default_backend_for_device(device)
    if not on_cpu:
        torch.accelerator.set_device_index(rank)
        backend = f"{CPU.type}:{dist.get_default_backend_for_device(CPU)},{device}:{backend}"  # as the training job's
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=10),
        device_id=None if on_cpu else torch.device(device, rank),
    )


def _run(message: bytes) -> bytes:
    """Run one job; the answer also says whether this rank can run another."""
    try:
        job = pickle.loads(message)
        torch.manual_seed(job["seed"])
        random.seed(job["seed"])
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(job["seed"] % 2**32)
        result = job["fn"](*job["args"], **job["kwargs"])
        answer = ("done", result, _unusable())
        return _pickling.dumps(answer)
    except BaseException as error:
        text = traceback.format_exc()
        try:
            shipped = _pickling.dumps(("error", (error, text)))
            pickle.loads(shipped)
        except Exception:
            shipped = _pickling.dumps(("error", (None, text)))
        return shipped


def _unusable() -> str | None:
    """Why this rank cannot run another job, or None; resets what can be reset."""
    if not dist.is_initialized():
        return "the process group was destroyed"
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if threads:
        return f"threads are running: {threads}"
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    groups = groups_by_name()
    made = {group.group_desc for name, group in groups.items() if name not in _kept_groups | {"0"}}
    return "it made process groups" if made - _LIBRARIES else None

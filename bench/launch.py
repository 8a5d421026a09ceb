"""Run a worker of this folder on several ranks and bring its answer back.

    launch("rounds", 2, {...})     torchrun -m bench.rounds REQUEST ANSWER, two ranks, one thread each

The answer is read from a file: gloo processes sometimes abort at exit, after their work is done.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class LaunchError(RuntimeError):
    """A worker gave no answer; its last lines."""


def launch(worker: str, ranks: int, request: dict[str, Any], *, timeout: float = 1200.0) -> Any:
    """What rank 0 of `bench.<worker>` answered.

    Raises:
        LaunchError: no answer, or not within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        ask, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        ask.write_text(json.dumps(request))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", f"bench.{worker}", str(ask), str(answer)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            said, _ = process.communicate()
            raise LaunchError(f"bench.{worker} took longer than {timeout:.0f} s:\n{said[-4000:]}") from None
        if not answer.exists():
            raise LaunchError(f"bench.{worker} gave no answer (exit {process.returncode}):\n{said[-6000:]}")
        return json.loads(answer.read_text())


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    return {**defaults, **os.environ, "PYTHONPATH": path}


def read_request() -> dict[str, Any]:
    """For a worker: what it was asked."""
    return json.loads(Path(sys.argv[1]).read_text())


def write_answer(answer: Any) -> None:
    """For a worker's rank 0: whole or not at all."""
    path = Path(sys.argv[2])
    part = path.with_suffix(".part")
    part.write_text(json.dumps(answer))
    part.rename(path)

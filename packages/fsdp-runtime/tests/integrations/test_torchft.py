"""torchft's manager with our units: a replica that leaves and comes back, on CPU ranks."""

import json
import subprocess
import sys
from itertools import chain, groupby
from pathlib import Path

import pytest

pytest.importorskip("torchft")
import torchft_job


def replayed(participants):
    """The weights of one process that reads what the replicas read; replica 0 takes part in every step."""
    model = torchft_job.model_of(0)
    optimizer = torchft_job.optimizer_of(model)
    for step, replicas in enumerate(participants):
        for replica in range(replicas):
            for rank in range(torchft_job.RANKS):
                loss = model(torchft_job.batch(step, replica, rank)).square().mean()
                (loss / (replicas * torchft_job.RANKS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def test_a_replica_that_was_killed_comes_back_to_the_weights_of_the_one_that_stayed(tmp_path):
    command = [sys.executable, torchft_job.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    logs = "".join(path.read_text()[-2000:] for path in tmp_path.glob("log-*"))
    assert done.returncode == 0, done.stderr + logs
    results = {
        name: json.loads(Path(tmp_path / f"{name}.json").read_text()) for name in ("0-0", "0-1", "1-0", "1-1")
    }
    stayed, back = results["0-0"], results["1-0"]
    assert stayed["participants"][-3:] == [2, 2, 2]
    changes = [count for count, _ in groupby(stayed["participants"])]
    assert changes == [1, 2, 1, 2]  # alone, together, alone, together
    assert len(back["participants"]) < len(stayed["participants"])
    for result in results.values():
        assert result["step"] == stayed["step"]
        assert result["weights"] == stayed["weights"]
    wanted = replayed(stayed["participants"])
    assert list(chain(*stayed["weights"])) == pytest.approx(list(chain(*wanted)), rel=1e-4, abs=1e-6)

"""torchao's float8 on both systems, as `compare` runs it."""

import importlib.util

import pytest
from train_helpers import losses, tiny, train

from fsdp_runtime.train import systems
from fsdp_runtime.train.compare import QUANTIZED_TOLERANCE
from ragged_shard.testing import run_ranks


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_runs_learn_as_plain_ones_do(folder, tmp_path):
    found = {}
    for system in ("fsdp_runtime", "fsdp_runtime_float8", "fsdp2_float8"):
        out = tmp_path / system
        summary = run_ranks(2, train, tiny(folder, system=system, precision="bf16", steps=4), out)[0]
        assert isinstance(summary, dict), summary
        found[system] = losses(out)
    assert found["fsdp_runtime_float8"] != found["fsdp_runtime"]
    assert found["fsdp_runtime_float8"] == pytest.approx(found["fsdp_runtime"], rel=QUANTIZED_TOLERANCE)
    assert found["fsdp_runtime_float8"] == pytest.approx(found["fsdp2_float8"], rel=1e-2)


def test_without_torchao_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(systems.importlib.util, "find_spec", lambda name: None)
    for system in ("fsdp_runtime_float8", "fsdp2_float8"):
        assert "torchao is not installed" in str(systems.not_installed(system))

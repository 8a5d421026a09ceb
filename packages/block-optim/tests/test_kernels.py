"""The Triton kernels in Triton's interpreter, against the torch ops."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_give_the_bits_of_the_torch_ops_and_keep_nan():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parent / "kernel_check.py"
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same bits:") == 8
    assert done.stdout.count("extremes:") == 3
    assert done.stdout.count("NaN stays:") == 2

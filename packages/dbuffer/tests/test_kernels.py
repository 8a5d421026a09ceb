"""The Triton kernels in Triton's interpreter, against the torch ops."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def run(script, **environment):
    env = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    path = Path(__file__).parent / script
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_give_the_bits_of_the_torch_ops():
    shown = run("kernel_check.py", TRITON_INTERPRET="1")
    assert shown.count("same bits:") == 29
    assert shown.count("all codes") == 1


def test_kernels_compile_for_sm_90_without_local_memory_and_move_vectors(tmp_path):
    shown = run("compile_check.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert shown.count("compiled:") == 18

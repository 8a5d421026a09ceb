"""The scripts of `examples/`, launched by torchrun as their docstrings say."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.long


def losses_of(script: str, ranks: int, out: Path, *options: str) -> dict[int, float]:
    """Launch a script and return its printed losses by step."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(EXAMPLES / script), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stdout)}


def test_train_continues_on_three_ranks_as_on_two_and_exports_one_file(tmp_path):
    from safetensors.torch import load_file

    two = losses_of("train.py", 2, tmp_path, "--steps", "26")
    assert list(two) == list(range(1, 27))
    assert two[26] < two[1] - 2
    shutil.rmtree(tmp_path / "26")
    shutil.rmtree(tmp_path / "export")
    three = losses_of("train.py", 3, tmp_path, "--steps", "26", "--resume")
    assert three == pytest.approx({step: two[step] for step in range(21, 27)}, abs=2e-3)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported["layers.3.attention.qkv.weight"].shape == (384, 128)


@pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft and transformers are not installed"
)
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it
def test_finetuned_adapters_continue_on_three_ranks_as_on_two_and_load_in_peft(tmp_path):
    import peft
    import transformers

    first, other = tmp_path / "first", tmp_path / "other"
    two = losses_of("finetune_hf.py", 2, first, "--steps", "6")
    three = losses_of("finetune_hf.py", 3, first, "--steps", "9", "--resume")
    uninterrupted = losses_of("finetune_hf.py", 2, other, "--steps", "9")
    assert two[6] < two[1] - 0.3
    assert {**two, **three} == pytest.approx(uninterrupted, abs=2e-3)

    base = transformers.AutoModelForCausalLM.from_pretrained(first / "random")
    model = peft.PeftModel.from_pretrained(base, first / "adapter")
    changed = [param for name, param in model.named_parameters() if "lora_B" in name]
    assert len(changed) == 14
    assert all(param.count_nonzero() for param in changed)


def test_the_examples_stay_as_short_as_they_promise():
    limits = {"train.py": 200, "finetune_hf.py": 120, "ray_train.py": 80}
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lines.keys() == limits.keys()
    assert all(lines[name] <= limits[name] for name in limits), lines


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_under_ray_one_worker_continues_with_the_losses_of_an_uninterrupted_run(tmp_path):
    def last(storage: str, workers: int, steps: int) -> str:
        command = [sys.executable, str(EXAMPLES / "ray_train.py"), "--storage", str(tmp_path / storage)]
        options = ["--workers", str(workers), "--steps", str(steps)]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    last("first", 2, 2)
    assert last("first", 1, 4) == last("other", 1, 4)

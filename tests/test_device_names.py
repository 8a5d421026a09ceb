"""Names of devices are in one file of a package at most: whatever differs between devices is decided there."""

import ast
import re
from pathlib import Path

import pytest
import torch

from ragged_shard import has_triton

ROOT = Path(__file__).parent.parent
PACKAGES = {
    path.name: path for path in (ROOT / "packages").glob("*/src/*") if (path / "__init__.py").exists()
}
KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "npu", "mtia", "hip")
NAME = re.compile(rf"({'|'.join((*KINDS, 'nccl'))})(:.*)?")
ASKS = ("is_cuda", "is_xpu", "is_mps")  # of a tensor
DECIDES = {
    "ragged_shard": ["_device.py"],
    "block_optim": ["core/device.py"],
    "fsdp_runtime": ["train/hardware.py"],
}


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of all nodes that are expressions of a string alone."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def device_names(text: str) -> list[str]:
    """Where a file names a kind of device: "cuda:0", "nccl", `torch.cuda`, an import of it, `x.is_cuda`, `x.cuda()`."""
    tree = ast.parse(text)
    said = docstrings(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            names = NAME.fullmatch(node.value) is not None
        elif isinstance(node, ast.Attribute) and node.attr in ASKS:
            names = True
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in KINDS[1:]
        ):
            names = True  # x.cuda(); every device has x.cpu()
        elif isinstance(node, ast.Attribute) and node.attr in KINDS:
            names = ast.unparse(node.value) == "torch"
        elif isinstance(node, ast.ImportFrom):
            names = any(f"{node.module}.{alias.name}".startswith(_MODULES) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = any(alias.name.startswith(_MODULES) for alias in node.names)
        else:
            continue
        if names:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


_MODULES = tuple(f"torch.{kind}" for kind in KINDS)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_device_names_are_in_one_file_of_a_package(package):
    root = PACKAGES[package]
    files = {path.relative_to(root).as_posix(): device_names(path.read_text()) for path in root.rglob("*.py")}
    decides = DECIDES.get(package, [])
    assert {file for file, names in files.items() if names} >= set(decides)
    assert {file: names for file, names in files.items() if names and file not in decides} == {}


def pinned_without_a_device(text):
    """Calls that ask for page-locked memory and name no device: they fail under `torch.set_default_device`."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    keywords = ((node, {k.arg for k in node.keywords}) for node in calls)
    return [
        f"line {node.lineno}" for node, names in keywords if "pin_memory" in names and "device" not in names
    ]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_page_locked_memory_is_asked_for_on_the_cpu_by_name(package):
    tensors = {
        path.name: pinned_without_a_device(path.read_text())
        for path in PACKAGES[package].rglob("*.py")
        if re.search(r"torch\.(empty|zeros)\(", path.read_text())
    }
    assert not any(tensors.values()), tensors


@pytest.mark.parametrize(
    "text",
    ['x.to("cuda")', 'd == "cpu:0"', "torch.cuda.synchronize()", "import torch.cuda", "from torch.cuda import Event",
     "from torch import xpu", 'init("cpu:gloo,cuda:nccl")', 'KINDS = {"mps": 1}', 'backend == "nccl"', "x.is_cuda",
     "x.cuda(0)"],
)  # fmt: skip
def test_a_device_name_is_found(text):
    assert device_names(text)


def test_what_names_no_device_is_not():
    text = '"""cuda"""; x = 1  # torch.cuda\nf"{device} is not CUDA"; CPU.type; torch.accelerator; os.cpu_count()'
    assert not device_names(text)


def test_kernels_are_not_for_rocm_whose_devices_have_the_same_name(monkeypatch):
    pytest.importorskip("triton")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    assert has_triton(cuda)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not has_triton(cuda)

"""Private names of torch stay in one module."""

import ast
from pathlib import Path

import block_optim

ROOT = Path(block_optim.__file__).parent


def test_only_one_module_uses_private_names_of_torch():
    for path in ROOT.rglob("*.py"):
        if path.name == "_torch_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                owner = ast.unparse(node.value)
                assert not owner.startswith("torch"), f"{path.name}: {owner}.{node.attr}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert not any(n.startswith("_") for n in names), f"{path.name}: {names}"

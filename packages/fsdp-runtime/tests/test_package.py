"""The package imports without its extras, and exports what it says."""

import subprocess
import sys
from importlib import metadata

import fsdp_runtime


def test_the_installed_version_is_the_modules():
    assert metadata.version("fsdp-runtime") == fsdp_runtime.__version__


def test_every_exported_name_is_there():
    assert all(hasattr(fsdp_runtime, name) for name in fsdp_runtime.__all__)
    assert set(fsdp_runtime.__all__) >= {
        "fully_shard",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "block_policies",
    }


def test_importing_it_needs_no_extra_and_adapters_import_no_trainer():
    code = """
import importlib, sys
trainers = {"accelerate", "lightning_fabric", "torchtitan", "transformers", "verl"}
for name in ("accelerate", "fabric", "torchtitan", "transformers", "verl"):
    importlib.import_module(f"fsdp_runtime.integrations.{name}")
    assert not trainers & sys.modules.keys(), name
for name in [name for name in sys.modules if name.startswith("fsdp_runtime")]:
    del sys.modules[name]
for name in ("block_optim", "rich", "matplotlib", "safetensors", "transformers"):
    sys.modules[name] = None
import fsdp_runtime
"""
    subprocess.run([sys.executable, "-c", code], check=True)

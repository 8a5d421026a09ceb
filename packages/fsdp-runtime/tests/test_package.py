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


def test_importing_it_needs_no_extra():
    code = (
        "import sys\n"
        "for name in ('block_optim', 'rich', 'matplotlib', 'safetensors', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import fsdp_runtime\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

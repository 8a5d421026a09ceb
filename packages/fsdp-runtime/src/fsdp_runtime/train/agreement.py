"""Whether all ranks were started alike: options, versions, data, parameters. Asked before the first step.

Ranks of several machines read their own command line, packages and files. Where they differ, training would wait for
a collective that another rank never issues, or go on with a model that is nobody's.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_runtime import installed_versions
from ragged_shard import same_on_all_ranks

from .config import RunConfig
from .errors import TrainError

# Rank 0 chooses the folder; paths may differ between machines: what is in the files is compared.
_OWN = ("out", "data", "held_out", "hf_config")


def check_agreement(values: Mapping[str, Any]) -> None:
    """Compare values, by their text, over all ranks.

    Collective: one all-reduce of 64 bytes; if they differ, all-gathers of the values.

    Raises:
        TrainError: on every rank, with the first name whose values differ and the ranks that have each.
    """
    try:
        same_on_all_ranks(values)
    except ValueError as error:
        raise TrainError(str(error)) from None


def check_options(config: RunConfig) -> None:
    """`check_agreement` on options and versions.

    Raises:
        TrainError: they differ.
    """
    options = {f"--{name.replace('_', '-')}": v for name, v in config.to_json().items() if name not in _OWN}
    path = Path(config.hf_config) if config.hf_config else None
    model = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path and path.is_file() else None
    check_agreement({**options, "the content of --hf-config": model, **installed_versions("transformers")})


def check_data(identity: str) -> None:
    """`check_agreement` on what the data files are called and their sizes.

    Raises:
        TrainError: they differ.
    """
    check_agreement({"--data (a digest of names and sizes)": identity})


def check_model(model: nn.Module) -> None:
    """`check_agreement` on parameters, in their order.

    Raises:
        TrainError: they differ.
    """
    listed = enumerate(model.named_parameters())
    check_agreement({f"parameter {n}": f"{name} {tuple(p.shape)} {p.dtype}" for n, (name, p) in listed})

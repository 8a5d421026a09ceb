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

from .config import RunConfig
from .errors import TrainError, from_all, listed

# Rank 0 chooses the folder; paths may differ between machines: what is in the files is compared.
_OWN = ("out", "data", "held_out", "hf_config")


def check_agreement(values: Mapping[str, Any]) -> None:
    """Compare values, by their text, over all ranks.

    Collective: one gather of a digest, and one of the values where digests differ.

    Raises:
        TrainError: on every rank, with the first name whose values differ and the ranks that have each.
    """
    mine = {name: str(value) for name, value in values.items()}
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(from_all(digest))) == 1:
        return
    found = from_all(mine)
    for name in dict.fromkeys(name for theirs in found for name in theirs):
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(found):
            ranks.setdefault(theirs.get(name, "absent"), []).append(rank)
        if len(ranks) > 1:
            said = "; ".join(f"{value} on {listed(which)}" for value, which in ranks.items())
            raise TrainError(f"ranks do not agree on {name}: {said}")


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

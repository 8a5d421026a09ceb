"""Models of transformers, as they are."""

import pytest
from parity_hf import CONFIGS, train_all

from ragged_shard.testing import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")


@pytest.mark.parametrize("ranks", [2, 3])
def test_transformers_models_train_as_in_one_process_and_as_under_fsdp2(ranks: int) -> None:
    for (name, system), (losses, parameters) in run_ranks(ranks, train_all, list(CONFIGS), timeout=240)[
        0
    ].items():
        assert losses < 1e-6, (name, system, losses)
        assert parameters < 1e-5, (name, system, parameters)

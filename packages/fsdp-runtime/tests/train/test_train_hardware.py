"""Which device a rank of the job takes, on machines that show all devices or one."""

import pytest
import torch

from fsdp_runtime.train.errors import TrainError
from fsdp_runtime.train.hardware import own_device


@pytest.fixture
def visible(monkeypatch):
    """Pretends that torch sees so many devices; returns the list of indices that were made current."""
    chosen: list[int] = []

    def see(count):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        return chosen

    return see


@pytest.mark.parametrize(("count", "local_rank", "index"), [(8, 3, 3), (1, 0, 0), (1, 7, 0)])
def test_a_rank_takes_its_own_device_or_the_only_one(visible, count, local_rank, index):
    chosen = visible(count)
    assert own_device("cuda", local_rank) == torch.device("cuda", index)
    assert chosen == [index]


def test_a_rank_without_a_device_is_told_how_many_there_are(visible):
    visible(2)
    with pytest.raises(TrainError, match="local rank 2 has no cuda device: 2 are visible"):
        own_device("cuda", 2)

"""Ranks take their devices and agree before they train."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from train_helpers import tiny, train, with_changes

from fsdp_runtime.train import TrainError
from fsdp_runtime.train.errors import check_agreement, check_model
from fsdp_runtime.train.hardware import own_device
from fsdp_runtime.train.launch import check_options
from ragged_shard.dist import gather_from_ranks
from ragged_shard.testing import on_ranks


@on_ranks(3)
def test_options_versions_and_parameters_that_differ_are_named_with_their_ranks(tmp_path):
    config = tiny(tmp_path)
    odd = dist.get_rank() == 1
    sizes = (3, 4 + odd, 3)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, size) for size in sizes))
    check_options(config)
    check_options(with_changes(config, out=str(odd), data=(str(odd),)))
    cases: list[tuple[Any, Any, str]] = [
        (check_options, with_changes(config, batch=12 + 6 * odd), "--batch: 12 on ranks 0, 2; 18 on rank 1"),
        (check_options, with_changes(config, resume=odd), "--resume: False on ranks 0, 2; True on rank 1"),
        (check_agreement, {"triton": "3.7"} if odd else {}, "triton: absent on ranks 0, 2; 3.7 on rank 1"),
        (check_model, model, "parameter 2: 1.weight (4, 2) torch.float32 on ranks 0, 2; "
                             "1.weight (5, 2) torch.float32 on rank 1"),
    ]  # fmt: skip
    for check, value, message in cases:
        with pytest.raises(TrainError) as error:
            check(value)
        assert str(error.value) == f"ranks do not agree on {message}"


@on_ranks(2)
def test_data_that_differs_is_named_before_the_first_step(folder, tmp_path):
    config = tiny(folder)
    if dist.get_rank() == 1:
        config = with_changes(config, data=(str(folder / "text" / "1*.py"),))
    message = train(config, tmp_path)
    assert message.startswith("ranks do not agree on --data (a digest of names and sizes): ")
    assert gather_from_ranks(message) == [message] * 2


@pytest.mark.parametrize(("count", "local_rank", "index"), [(8, 3, 3), (1, 0, 0), (1, 7, 0), (2, 2, None)])
def test_a_rank_takes_its_own_device_or_the_only_one(monkeypatch, count, local_rank, index):
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    if index is None:
        with pytest.raises(TrainError, match="local rank 2 has no cuda device: 2 are visible"):
            own_device("cuda", local_rank)
    else:
        assert own_device("cuda", local_rank) == torch.device("cuda", index)
        assert chosen == [index]

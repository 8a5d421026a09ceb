"""Ranks that were not started alike all say the same line, before they train."""

import torch
import torch.distributed as dist
from train_helpers import text_folder, tiny, train, with_changes

from fsdp_runtime.train import TrainError
from fsdp_runtime.train.errors import check_agreement, check_model
from fsdp_runtime.train.launch import check_options
from ragged_shard.testing import run_ranks


def said(check, *arguments):
    try:
        check(*arguments)
    except TrainError as error:
        return str(error)
    return None


def _disagree(config):
    """What ranks say of many differences, one after the other; rank 1 is the odd one."""
    odd = dist.get_rank() == 1
    sizes = (3, 4 + odd, 3)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, size) for size in sizes))
    return [
        said(check_options, config),
        said(check_options, with_changes(config, out=str(odd), data=(str(odd),))),
        said(check_options, with_changes(config, batch=12 + 6 * odd)),
        said(check_options, with_changes(config, resume=odd)),
        said(check_agreement, {"torch": "2.13.0", **({"triton": "3.7"} if odd else {})}),
        said(check_model, model),
    ]


def test_options_versions_and_parameters_that_differ_are_named_with_the_ranks_that_have_each(tmp_path):
    found = run_ranks(3, _disagree, tiny(tmp_path))
    assert found[0] == found[1] == found[2]
    assert found[0] == [
        None,
        None,
        "ranks do not agree on --batch: 12 on ranks 0, 2; 18 on rank 1",
        "ranks do not agree on --resume: False on ranks 0, 2; True on rank 1",
        "ranks do not agree on triton: absent on ranks 0, 2; 3.7 on rank 1",
        "ranks do not agree on parameter 2: 1.weight (4, 2) torch.float32 on ranks 0, 2; "
        "1.weight (5, 2) torch.float32 on rank 1",
    ]


def _with_data_of_its_own(config, folder):
    if dist.get_rank() == 1:
        config = with_changes(config, data=(str(folder / "text" / "1*.py"),))
    return train(config, folder / "run")


def test_data_that_differs_is_named_before_the_first_step(tmp_path):
    text_folder(tmp_path)
    messages = run_ranks(2, _with_data_of_its_own, tiny(tmp_path), tmp_path)
    assert len(set(messages)) == 1
    assert messages[0].startswith("ranks do not agree on --data (a digest of names and sizes): ")

"""The whole model as safetensors files that plain torch and Hugging Face's loaders read."""

import json

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import seeded, shard

from fsdp_runtime import save_safetensors
from ragged_shard.testing import run_ranks

safetensors = pytest.importorskip("safetensors.torch")


def save(folder, options, tied=False):
    model = shard(seeded(tied=tied))
    return [str(path) for path in save_safetensors(model, folder, **options)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_file_holds_the_full_model(ranks, tmp_path):
    (found,) = run_ranks(ranks, save, str(tmp_path), {})[-1]
    assert found == str(tmp_path / "model.safetensors")
    content, wanted = safetensors.load_file(found), seeded().state_dict()
    assert content.keys() == wanted.keys()
    assert all(torch.equal(content[key], wanted[key]) for key in wanted)


def test_several_files_have_an_index_and_the_dtype_asked_for(tmp_path):
    files = run_ranks(2, save, str(tmp_path), {"max_file_bytes": 400, "dtype": torch.bfloat16})[0]
    assert len(files) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    wanted = seeded().state_dict()
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in wanted.values())
    for key, name in index["weight_map"].items():
        assert torch.equal(safetensors.load_file(tmp_path / name)[key], wanted[key].bfloat16())
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_tied_parameter_is_written_once(tmp_path):
    (found,) = run_ranks(2, save, str(tmp_path), {}, tied=True)[0]
    assert "head.weight" not in safetensors.load_file(found)


def save_nowhere(folder):
    with pytest.raises(OSError, match=r"rank 0 could not write to .*not_a_folder"):
        save(folder, {})
    return dist.get_rank()


def test_a_failure_to_write_is_raised_on_every_rank(tmp_path):
    (tmp_path / "not_a_folder").write_text("")
    assert run_ranks(3, save_nowhere, str(tmp_path / "not_a_folder")) == [0, 1, 2]

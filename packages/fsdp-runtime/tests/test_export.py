"""The whole model as safetensors files that plain torch and Hugging Face's loaders read."""

import contextlib
import json
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import full_values, same_bits, seeded, shard

from fsdp_runtime import iter_full_params, load_safetensors, save_safetensors
from fsdp_runtime.checkpoint.runs import Run
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

safetensors = pytest.importorskip("safetensors.torch")


def save(folder, options, tied=False):
    model = shard(seeded(tied=tied))
    return [str(path) for path in save_safetensors(model, folder, **options)]


@pytest.mark.parametrize("tied", [False, True])
def test_one_file_holds_the_full_model_and_a_tied_parameter_once(tied, tmp_path):
    (found,) = run_ranks(3, save, str(tmp_path), {}, tied=tied)[-1]
    assert found == str(tmp_path / "model.safetensors")
    content, wanted = safetensors.load_file(found), seeded(tied=tied).state_dict()
    assert content.keys() == wanted.keys() - ({"head.weight"} if tied else set())
    assert all(torch.equal(content[key], wanted[key]) for key in content)


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


@on_ranks(2)
def test_an_earlier_export_into_the_folder_is_not_read_for_the_new_one(tmp_path):
    for seed, limit in enumerate((10**9, 400, 900, 10**9)):
        model, loaded = shard(seeded(seed=seed)), shard(seeded(seed=9))
        files = save_safetensors(model, tmp_path, max_file_bytes=limit)
        load_safetensors(loaded, tmp_path)
        assert same_bits(full_values(loaded).values(), full_values(model).values())
        dist.barrier()
        assert {path.name for path in tmp_path.glob("*.safetensors")} == {path.name for path in files}
        dist.barrier()


@on_ranks(2)
def test_ranks_leave_an_export_together_where_one_has_no_memory(tmp_path):
    model = shard(seeded())
    failing = mock.patch.object(Run, "own", side_effect=MemoryError("none left"))
    for export in (lambda: list(iter_full_params(model)), lambda: save_safetensors(model, tmp_path)):
        here = failing if dist.get_rank() == 0 else nullcontext()
        with here, pytest.raises((RuntimeError, OSError), match="MemoryError: none left"):
            export()


@on_ranks(2)
def test_an_export_that_cannot_write_gathers_no_further_tensors(tmp_path):
    def sent():
        with record_collectives() as record, contextlib.suppress(OSError):
            save_safetensors(model, tmp_path, bucket_bytes=1)
        return sum(event.bytes_sent for event in record.events if event.kind != "all_reduce")

    model = shard(seeded(width=128, blocks=4))
    whole = sent()
    with mock.patch("fsdp_runtime.checkpoint.files._write_tensor", side_effect=OSError("disk full")):
        part = sent()
    assert dist.get_rank() == 0 or part < whole / 2  # rank 0 only receives


@on_ranks(3)
def test_what_cannot_be_written_is_raised_by_name_on_every_rank_and_leaves_nothing(tmp_path):
    rank = dist.get_rank()
    (tmp_path / f"file{rank}").write_text("")
    with pytest.raises(OSError, match=r"rank 0 could not write to .*file0"):
        save(tmp_path / "file0", {})
    out = tmp_path / "out"
    model = seeded()
    model.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(OSError, match=r"phases is torch.complex128, which safetensors files do not have"):
        save_safetensors(model, out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(OSError, match=r"pip install safetensors"):
            save_safetensors(seeded(), out)
    assert not out.exists()

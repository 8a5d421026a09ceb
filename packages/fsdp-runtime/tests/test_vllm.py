"""The trainer's side of vLLM's weight transfer, against its classes or, without it, their contract."""

import pytest
import torch
import torch.distributed as dist
from runtime_helpers import full_values, seeded, shard, step_of
from vllm_contract import FOLDER, interface

from fsdp_runtime import full_params
from fsdp_runtime.integrations.vllm import weight_source
from ragged_shard.testing import on_ranks, record_collectives


def model_with_a_buffer():
    model = seeded(width=16, tied=True)
    model.register_buffer("router_bias", torch.arange(4.0))
    return shard(model)


def values(model, dtype=torch.float32):
    """Whole tensors by names, gathered one by one; of tied parameters the first name."""
    state = full_values(model)
    del state["head.weight"]
    return {name: t.to(dtype, copy=True) for name, t in state.items()}


@on_ranks(3)
def test_each_pass_has_the_tensors_of_the_state_dict_as_metadata_says():
    model = model_with_a_buffer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with interface(), record_collectives() as record:
        source = weight_source(model, dtype=torch.bfloat16, bucket_bytes=2000)
        assert len(source.metadata) == 10
    assert record.kinds == []
    assert source.metadata is source.metadata
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    passes = []
    for number in range(2):
        wanted = values(model, torch.bfloat16)
        passes.append({name: tensor.clone() for name, tensor in source.iter_full()})
        assert list(passes[-1]) == source.owned_names(dist.get_rank()) == [m.name for m in source.metadata]
        for meta in source.metadata:
            tensor = passes[-1][meta.name]
            assert (tensor.dtype, tuple(tensor.shape)) == (meta.dtype, meta.shape)
            assert tensor.equal(wanted[meta.name])
        assert wanted.keys() == passes[-1].keys()
        step_of(model, optimizer, number)
    assert not passes[0]["blocks.0.weight"].equal(passes[1]["blocks.0.weight"])


@on_ranks(3)
def test_a_pass_over_weights_that_an_optimizer_or_a_merge_changes_raises():
    model = model_with_a_buffer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with interface():
        source = weight_source(model, bucket_bytes=1)

    def merge():
        with full_params(model.blocks[1]):
            model.blocks[1].weight.data += torch.ones(16, 16)

    for change, name in ((lambda: step_of(model, optimizer), r"\S+"), (merge, r"blocks\.1\.\w+")):
        iterator = source.iter_full()
        next(iterator)
        change()
        with pytest.raises(RuntimeError, match=rf"{name} was written to since iter_full was called"):
            list(iterator)
        wanted = values(model)
        assert all(tensor.equal(wanted[name]) for name, tensor in source.iter_full())
    with full_params(model), pytest.raises(RuntimeError, match="full_params"):
        source.iter_full()


@on_ranks(2)
def test_a_model_with_other_tensors_than_metadata_is_refused():
    model = model_with_a_buffer()
    with interface():
        source = weight_source(model)
    assert source.metadata
    model.register_buffer("added", torch.zeros(1))
    with pytest.raises(RuntimeError, match="differ from metadata; make a new weight_source"):
        source.iter_full()


def test_vllms_own_classes_take_it():
    base = pytest.importorskip(f"{FOLDER}.base", reason="vLLM is not installed")
    source = weight_source(seeded())
    assert isinstance(source, base.WeightSource)
    assert all(isinstance(meta, base.ParamMeta) for meta in source.metadata)

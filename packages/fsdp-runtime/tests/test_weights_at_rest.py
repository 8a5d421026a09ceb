"""Frozen weights that are kept as codes only: against one process that computes with what the codes say."""

import re
from typing import Any

import pytest
import quantized_steps
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantized_steps import quantized
from runtime_helpers import assert_same_gradients, loss_of, seeded, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import ragged_shard
import ragged_shard.state_dict
from dbuffer.encodings import BlockQuantizedTensor
from fsdp_runtime import QuantizationPolicy, fully_shard
from fsdp_runtime._schedule.model import member_of
from fsdp_runtime.memory import unit_memory
from fsdp_runtime.quantization import BlockFP8, BlockInt8, BlockNF4
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

WIDTH = 64
NF4, INT8, FP8 = BlockNF4(64), BlockInt8(64), BlockFP8((16, 16))
FORMATS = (NF4, INT8, FP8)


class Lora(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted():
    """A frozen body with adapters in its blocks."""
    model = seeded(width=WIDTH, blocks=2).requires_grad_(False)
    torch.manual_seed(1)
    for index in range(len(model.blocks)):
        model.blocks[index] = Lora(WIDTH)
    return model


def shard(model, fmt=NF4, **options):
    policy = QuantizationPolicy(at_rest=fmt)
    for block in model.blocks:
        fully_shard(block, quantization_policy=policy, **options)
    return fully_shard(model, **options)


def is_base(name):
    return name.endswith("base.weight")


def whole(fmt, tensor):
    """A matrix as codes: rows of bytes, rows of scales, and the values that they say."""
    codes, scales, run = quantized(fmt, tensor)
    return (
        codes.view(run.grid.rows, -1),
        scales.view(-1, run.grid.across),
        quantized_steps.read_back(fmt, tensor),
    )


def read_back(fmt, model):
    """The model, computing with what codes of its frozen matrices say."""
    for name, param in model.named_parameters():
        if is_base(name):
            param.data = whole(fmt, param)[2]
    return model


def assert_trains_as(reference, model, steps=2):
    """The same losses, and the same gradients and weights of the adapters; the base never changes."""
    ranks = dist.get_world_size()
    optimizers = [
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.5)
        for one in (reference, model)
    ]
    for step in range(steps):
        losses = [loss_of(reference, tokens(step, rank=rank)) for rank in range(ranks)]
        (sum(losses) / ranks).backward()
        loss = loss_of(model, tokens(step))
        loss.backward()
        torch.testing.assert_close(loss, losses[dist.get_rank()], rtol=1e-6 if step else 0, atol=0)
        assert_same_gradients(model, reference, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(3)
def test_adapters_train_on_values_of_codes_which_alone_are_kept_and_sent():
    for fmt in FORMATS:
        reference, model = read_back(fmt, adapted()), shard(adapted(), fmt)
        assert_trains_as(reference, model)
        for name, param in model.named_parameters():
            assert isinstance(param.local, BlockQuantizedTensor) is is_base(name)
            assert param.shape == dict(reference.named_parameters())[name].shape
            if is_base(name):
                assert param.full_tensor().equal(dict(reference.named_parameters())[name])
        assert_only_codes(model)


def assert_only_codes(model):
    """Of a unit's weights only codes and scales are kept, and travel."""
    groups = member_of(model.blocks[0]).unit.groups
    (coded,) = [group for group in groups if not group.holds_values]
    row = coded.plan.wire.row_bytes(coded.plan.geometry)
    shards = [flat.nbytes for flat in coded.buffer.shard]
    assert sum(shards) == row
    plain = [group.plan.layout for group in groups if group is not coded]
    values = 4 * sum(segment.shard_size for layout in plain for segment in layout.segments)
    memory = unit_memory(model.blocks[0])
    assert memory.weights == memory.sent == row + values
    assert (memory.gradients, memory.codes) == (values, 0)
    with record_collectives() as record:
        loss_of(model, tokens()).backward()
    sent = [(dist.get_world_size() - 1) * unit_memory(unit).sent for unit in (model, *model.blocks)]
    gathers = [event.bytes_sent for event in record.events if event.kind == "all_gather"]
    assert gathers == [*sent, *sent[:0:-1]]


def assert_codes(model, fmt, full):
    """Every base weight's entries are those of its whole values."""
    entries = model.state_dict()
    for name, value in full.items():
        if not is_base(name):
            assert entries[name].full_tensor().equal(value), name
            continue
        codes, scales, _ = whole(fmt, value)
        assert name not in entries
        found = entries[f"{name}.codes"]
        assert found.dtype == (torch.int8 if fmt is INT8 else torch.uint8)
        assert found.full_tensor().view(torch.uint8).equal(codes)
        assert entries[f"{name}.scales"].full_tensor().equal(scales)
        assert entries[f"{name}.format"] == fmt.record


def other_values():
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(value.shape, generator=generator) for name, value in adapted().state_dict().items()
    }


def save(folder):
    for number, fmt in enumerate(FORMATS):
        model = shard(adapted(), fmt)
        model.load_state_dict(other_values())
        assert_codes(model, fmt, other_values())
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/{number}")
    dcp.save(other_values(), checkpoint_id=f"{folder}/values")


def load(folder):
    for number, fmt in enumerate(FORMATS):
        model = shard(adapted(), fmt)
        loss_of(model, tokens())  # gathered before, of other values
        entries = get_model_state_dict(model)
        dcp.load(entries, checkpoint_id=f"{folder}/{number}")
        assert_codes(model, fmt, other_values())  # entries alias the shard
        set_model_state_dict(model, entries)
        assert_codes(model, fmt, other_values())
        expected = adapted()
        expected.load_state_dict(other_values())
        assert loss_of(model, tokens()).equal(loss_of(read_back(fmt, expected), tokens()))
        if number >= 2:
            continue
        values = shard(adapted(), fmt)
        for name, value in other_values().items():  # one at a time
            one = {name: torch.empty_like(value)}
            dcp.load(one, checkpoint_id=f"{folder}/values")
            values.load_state_dict(one, strict=False)
        assert_codes(values, fmt, other_values())


def test_checkpoints_hold_codes_and_load_at_other_numbers_of_ranks_and_from_values(tmp_path):
    run_ranks(2, save, str(tmp_path))
    run_ranks(3, load, str(tmp_path))


@on_ranks(3)
def test_codes_load_from_whole_ones_and_values_from_another_layout():
    source = fully_shard(adapted())  # plain, laid out otherwise
    source.load_state_dict(other_values())
    codes = shard(adapted())
    codes.load_state_dict(source.state_dict())
    assert_codes(codes, NF4, other_values())
    full = {name: value.full_tensor() if value.ndim else value for name, value in codes.state_dict().items()}
    again = fully_shard(adapted(), quantization_policy=QuantizationPolicy(at_rest=NF4))
    again.load_state_dict(full)
    assert_codes(again, NF4, other_values())
    again.load_state_dict(adapted().state_dict())
    placements = {codes.blocks[0].base.weight.placements, again.blocks[0].base.weight.placements}
    again.load_state_dict(codes.state_dict())
    assert len(placements) == 2
    assert_codes(again, NF4, other_values())
    ragged_shard.state_dict.load_full_state_dict(again, adapted().state_dict())
    assert_codes(again, NF4, adapted().state_dict())
    name, message = (
        "blocks.0.base.weight",
        r"base\.weight\.codes: torch\.uint8 of shape \(64, 32\); BlockNF4\(size",
    )
    parts = {f"{name}.{part}": full[f"{name}.{part}"] for part in ("codes", "scales", "format")}
    parts[f"{name}.codes"] = parts[f"{name}.codes"][:, 1:]
    with pytest.raises(ValueError, match=message):
        again.load_state_dict(parts, strict=False)
    del parts[f"{name}.scales"]
    with pytest.raises(ValueError, match=r"expected 'blocks\.0\.base\.weight\.codes'"):
        again.load_state_dict(parts, strict=False)


def wide(fmt, seed=0) -> Any:
    """A frozen matrix with as many scales in blocks of 240 as of 256 columns."""
    torch.manual_seed(seed)
    linear = nn.Linear(2880, 16, bias=False).requires_grad_(False)
    linear.weight *= torch.logspace(-2, 2, 2880)
    return fully_shard(nn.Sequential(linear), quantization_policy=QuantizationPolicy(at_rest=fmt))


# In each row all have as many bytes of codes and as many scales.
LOOK_ALIKES = (
    (BlockInt8(240), BlockInt8(256)),
    (BlockFP8((16, 240)), BlockFP8((16, 256)), BlockFP8((1024, 256))),
    (BlockNF4(240), BlockNF4(256), BlockNF4(242)),
)


@on_ranks(3)
def test_codes_of_a_format_with_as_many_scales_are_refused_by_name(tmp_path):
    for number, formats in enumerate(LOOK_ALIKES):
        for saved in formats:
            source, folder = wide(saved), tmp_path / f"{number} {saved}"
            expected = source[0].weight.full_tensor()
            dcp.save(get_model_state_dict(source), checkpoint_id=folder)
            for fmt in formats:
                model = wide(fmt, seed=1)
                entries = get_model_state_dict(model)
                dcp.load(entries, checkpoint_id=folder)
                if fmt == saved:
                    set_model_state_dict(model, entries)
                    assert model[0].weight.full_tensor().equal(expected)
                else:
                    with pytest.raises(
                        ValueError, match=re.escape(f"0.weight.codes: saved in {spelled(saved)}, but")
                    ):
                        set_model_state_dict(model, entries)


def spelled(fmt):
    return f"{type(fmt).__name__}({fmt.size or fmt.tile})"


@on_ranks(3)
def test_codes_without_their_format_are_refused_with_the_entry_to_add():
    source, model = wide(INT8), wide(INT8, seed=1)
    entries = source.state_dict()
    record = entries.pop("0.weight.format")
    with pytest.raises(
        ValueError, match=rf"without '0\.weight\.format', .* add torch.tensor\({record}\) under"
    ):
        model.load_state_dict(entries, strict=False)
    model.load_state_dict({**entries, "0.weight.format": record})
    assert model[0].weight.full_tensor().equal(source[0].weight.full_tensor())
    entries["0.weight.format"] = record + 10**17
    with pytest.raises(
        ValueError, match=r"0\.weight\.codes: saved in codes of version 2 \(this .* version 1\)"
    ):
        model.load_state_dict(entries)


@on_ranks(3)
def test_a_weight_of_another_format_and_layout_is_loaded_by_its_values():
    torch.manual_seed(0)
    both = nn.Sequential(nn.Linear(2880, 16, bias=False), nn.Linear(2880, 16, bias=False)).requires_grad_(
        False
    )
    source: Any = fully_shard(both, quantization_policy=QuantizationPolicy(at_rest=BlockInt8(240)))
    model = wide(BlockInt8(256))
    assert source[0].weight.placements != model[0].weight.placements
    model.load_state_dict({"0.weight": source[0].weight})
    expected = whole(BlockInt8(256), source[0].weight.full_tensor())[2]
    assert model[0].weight.full_tensor().equal(expected)


@on_ranks(2)
def test_a_model_on_meta_gets_codes_and_never_values():
    for assign in (False, True):
        with torch.device("meta"):
            model = adapted()
        shard(model)
        if not assign:
            model.to_empty(device="cpu")
        base = model.blocks[0].base.weight
        assert isinstance(base.local, BlockQuantizedTensor)  # no memory for values, at no time
        assert base.is_meta is assign
        state = other_values()
        if assign:
            state = {name: nn.Parameter(value, not is_base(name)) for name, value in state.items()}
        model.load_state_dict(state, assign=assign)
        for name, param in model.named_parameters():
            assert isinstance(param.local, BlockQuantizedTensor) is is_base(name)
        expected = adapted()
        expected.load_state_dict(other_values())
        assert loss_of(model, tokens()).equal(loss_of(read_back(NF4, expected), tokens()))
        assert_codes(model, NF4, other_values())


@on_ranks(3)
def test_codes_stay_as_they_are_in_another_dtype():
    model = shard(adapted())
    before = model.blocks[0].base.weight.local.codes.clone()
    model.to(torch.bfloat16)
    assert model.blocks[0].base.weight.dtype == torch.bfloat16
    loss_of(model, tokens()).backward()
    assert model.blocks[0].base.weight.local.codes.equal(before)


@on_ranks(1)
def test_codes_are_not_trained_and_not_written_to():
    policy = QuantizationPolicy(at_rest=NF4, select=lambda name, param, module: name.endswith("weight"))
    with pytest.raises(ValueError, match=r"down\.weight was selected to be kept as codes, and is trained"):
        fully_shard(adapted().blocks[0], quantization_policy=policy)
    model = shard(adapted())
    base = model.blocks[0].base.weight
    with torch.no_grad(), pytest.raises(RuntimeError, match="load_state_dict quantize new values"):
        base.add_(1)
    with pytest.raises(RuntimeError, match="that is kept as codes"):
        nn.init.zeros_(base)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, tokens()).backward()
    with pytest.raises(RuntimeError, match="AdamW was given 2 weights that are kept as codes"):
        optimizer.step()
    base.requires_grad_(True)
    with pytest.raises(ValueError, match=r"base\.weight requires a gradient since, but is kept as codes"):
        loss_of(model, tokens())

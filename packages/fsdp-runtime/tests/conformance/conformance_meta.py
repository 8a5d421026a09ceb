"""Cases: parameters without memory at wrap time, initialized later."""

from functools import partial

import torch
import torch.distributed as dist
from conformance_models import (
    FULL_STATE_DICTS,
    Stack,
    adamw,
    assert_same,
    full,
    is_sharded,
    seeded,
    shard_stack,
    train,
    train_plain,
)
from conformance_registry import Raises, case, refusal
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

META = "Deferred initialization"


def on_meta():
    with torch.device("meta"):
        return Stack()


@case(META, "meta device, then `to_empty` and `reset_parameters`", ranks=3)
def meta_reset(fsdp):
    model = shard_stack(fsdp, on_meta())
    assert all(p.is_meta and is_sharded(p) for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, p in model.named_parameters():
        values = full(p)
        bound = 13**-0.5 if ".down." in name else 8**-0.5  # of nn.Linear: 1/sqrt(inputs)
        assert values.abs().max() <= bound, name
        assert values.numel() < 10 or values.std() > bound / 4, name
    before = [full(p) for p in model.parameters()]
    train(model, adamw(model))
    assert not any(torch.equal(full(p), old) for p, old in zip(model.parameters(), before, strict=True))


refusal(
    META, "forward with parameters on meta is refused by name",
    lambda fsdp: shard_stack(fsdp, on_meta())(torch.randn(2, 8)),
    Raises(RuntimeError, r"(?s)meta.*head\.weight|head\.weight.*meta"),
)  # fmt: skip


@case(
    META, "a sharded state dict with `load_state_dict(assign=True)`, over meta tensors or over values", ranks=3,
)  # fmt: skip
def meta_assign(fsdp):
    for build in (on_meta, partial(seeded, Stack, 7)):
        source = shard_stack(fsdp, seeded(Stack))
        model, reference = shard_stack(fsdp, build()), seeded(Stack)
        model.load_state_dict({k: v.clone() for k, v in source.state_dict().items()}, assign=True)
        assert not any(p.is_meta for p in model.parameters())
        assert_same(model, reference, rtol=0, atol=0)
        train(model, adamw(model))
        train_plain(reference, adamw(reference))
        assert_same(model, reference, rtol=1e-4, atol=1e-5)


@case(
    META, "`set_model_state_dict(full_state_dict=True)`, also with `broadcast_from_rank0`, over values or meta tensors",
    ranks=3, since=FULL_STATE_DICTS,
)  # fmt: skip
def set_model_full(fsdp):
    for from_rank0, build in (
        (False, partial(seeded, Stack)),
        (True, partial(seeded, Stack)),
        (True, on_meta),
    ):
        model = shard_stack(fsdp, build())
        state = seeded(Stack, 7).state_dict() if not from_rank0 or dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
        set_model_state_dict(model, state, options=options)
        assert_same(model, seeded(Stack, 7), rtol=0, atol=0)

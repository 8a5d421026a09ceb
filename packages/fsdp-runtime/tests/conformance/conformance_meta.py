"""Cases: parameters without memory at wrap time, initialized later."""

import torch
import torch.distributed as dist
import torch.nn as nn
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
from conformance_registry import Raises, case
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


@case(META, "meta device, `to_empty`, then values written to the sharded parameters")
def meta_fill(fsdp):
    model = shard_stack(fsdp, on_meta())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        for norm in (model.head,):
            nn.init.ones_(norm.weight)
            nn.init.constant_(norm.bias, 0.5)
    assert (full(model.head.weight) == 1).all()
    x = torch.randn(2, 8)
    torch.testing.assert_close(model(x), x.sum(1, keepdim=True).expand(2, 3) + 0.5)


@case(
    META,
    "forward with parameters on meta is refused by name",
    fsdp2=Raises(RuntimeError, r"(?s)meta.*head\.weight|head\.weight.*meta"),
)
def meta_forward(fsdp):
    shard_stack(fsdp, on_meta())(torch.randn(2, 8))


@case(META, "meta device, then a sharded state dict with `load_state_dict(assign=True)`", ranks=3)
def meta_assign(fsdp):
    source = shard_stack(fsdp, seeded(Stack))
    model = shard_stack(fsdp, on_meta())
    state = {name: value.clone() for name, value in source.state_dict().items()}
    model.load_state_dict(state, assign=True)
    reference = seeded(Stack)
    assert_same(model, reference)
    assert not any(p.is_meta for p in model.parameters())
    train(model, adamw(model))
    train_plain(reference, adamw(reference))
    assert_same(model, reference, rtol=1e-4, atol=1e-5)


@case(
    META,
    "meta device, then `set_model_state_dict(broadcast_from_rank0=True)`",
    ranks=3,
    since=FULL_STATE_DICTS,
)
def meta_broadcast(fsdp):
    model = shard_stack(fsdp, on_meta())
    state = seeded(Stack).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    assert_same(model, seeded(Stack))


@case(META, "sharded values are those of the unsharded model", ranks=3)
def same_seed(fsdp):
    assert_same(shard_stack(fsdp, seeded(Stack)), seeded(Stack), rtol=0, atol=0)

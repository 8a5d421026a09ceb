"""Cases: deferred initialization, state dicts and checkpoints."""

import copy
import io
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from conformance_models import (
    FULL_STATE_DICTS,
    MLP,
    Stack,
    adamw,
    all_sharded,
    assert_same,
    assert_same_gradients,
    backward_both,
    batch,
    check_training,
    full,
    inputs,
    is_sharded,
    mean_square,
    mesh,
    pair,
    seeded,
    shard_stack,
    train,
    train_plain,
)
from conformance_registry import Raises, case, refusal
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

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


STATE = "State"


FULL = StateDictOptions(full_state_dict=True)


def train_same(model, optimizer, steps):
    """Every rank the same rows, so that the number of ranks does not matter."""
    for step in range(steps):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        mean_square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    STATE,
    "`state_dict` has sharded tensors that share the parameters' memory, which stays where it is over steps",
)
def aliases(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    before, state = [(id(p), p.to_local().data_ptr()) for p in model.parameters()], model.state_dict()
    train(model, adamw(model))
    model.reshard()
    assert before == [(id(p), p.to_local().data_ptr()) for p in model.parameters()]
    for name, p in model.named_parameters():
        assert state[name].placements == p.placements
        assert state[name].to_local().data_ptr() == p.to_local().data_ptr(), name
        assert torch.equal(state[name].to_local(), p.to_local()), name


@case(STATE, "`state_dict` while unsharded: reshards, entries are sharded")
def while_unsharded(fsdp):
    model = shard_stack(fsdp, seeded(Stack), reshard_after_forward=False)
    model(torch.randn(2, 8))
    assert all(is_sharded(value) for value in model.state_dict().values())
    assert all_sharded(model)


@case(STATE, "`state_dict` of a submodule, with plain names and buffers")
def names(fsdp):
    build = lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), MLP(6))  # noqa: E731
    plain = build()
    model = build()
    fsdp.fully_shard(model[2], mesh=mesh())
    fsdp.fully_shard(model, mesh=mesh())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(model[2].state_dict()) == list(plain[2].state_dict())


@case(STATE, "`load_state_dict` of a sharded state dict, also of an older one", ranks=3)
def load(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, adamw(model))
    assert not torch.equal(full(model.head.weight), seeded(Stack).head.weight)
    missing, unexpected = model.load_state_dict(kept)
    assert not missing
    assert not unexpected
    assert_same(model, seeded(Stack), rtol=0, atol=0)
    kept.pop("head.bias")
    assert model.load_state_dict(kept, strict=False).missing_keys == ["head.bias"]
    train(model, adamw(model))


@case(
    STATE, "`load_state_dict` of an unsharded state dict", fsdp2=Raises(RuntimeError, "(?i)mixed|DTensor|copy"),
    ours=None,
)  # fmt: skip
def load_plain(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    model.load_state_dict(seeded(Stack, 7).state_dict())
    assert_same(model, seeded(Stack, 7), rtol=0, atol=0)


@case(
    STATE, "`get_model_state_dict`: sharded; `full_state_dict`: whole, on rank 0 alone with `cpu_offload`", ranks=3,
    since=FULL_STATE_DICTS,
)  # fmt: skip
def get_model(fsdp):
    model, reference = pair(fsdp)
    assert all(is_sharded(v) for v in get_model_state_dict(model).values())
    whole: dict = get_model_state_dict(model, options=FULL)
    for name, value in reference.state_dict().items():
        assert torch.equal(whole[name], value), name
    onto_rank0 = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(onto_rank0) == (dist.get_rank() == 0)


@case(
    STATE,
    "optimizer state: sharded like its parameter; `get_` and `set_` of model and optimizer state dicts go round",
    ranks=3,
)
def optimizer_state(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    optimizer = adamw(model)
    train(model, optimizer)
    for p in model.parameters():
        assert optimizer.state[p]["exp_avg"].placements == p.placements
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))  # else both share the moments
    assert "head.weight" in state["state"]
    other = shard_stack(fsdp, seeded(Stack, 7))
    twin = adamw(other)
    set_model_state_dict(other, get_model_state_dict(model))
    set_optimizer_state_dict(other, twin, optim_state_dict=state)
    train(model, optimizer)
    train(other, twin)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


@case(
    STATE, "`get_optimizer_state_dict(full_state_dict=True)`: whole tensors, the plain run's values", ranks=3,
    since=FULL_STATE_DICTS,
)  # fmt: skip
def optimizer_state_full(fsdp):
    model, reference = pair(fsdp)
    optimizer, plain = adamw(model), adamw(reference)
    train(model, optimizer)
    train_plain(reference, plain)
    found: Any = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    wanted: Any = get_optimizer_state_dict(reference, plain)["state"]
    assert found.keys() == wanted.keys()
    for name, state in wanted.items():
        torch.testing.assert_close(found[name]["exp_avg"], state["exp_avg"], rtol=1e-4, atol=1e-6)


@case(STATE, "`optimizer.state_dict` / `load_state_dict`", ranks=3)
def optimizer_native(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    optimizer = adamw(model)
    train(model, optimizer)
    twin = adamw(model)
    twin.load_state_dict(optimizer.state_dict())
    for p in model.parameters():
        assert torch.equal(twin.state[p]["exp_avg"].to_local(), optimizer.state[p]["exp_avg"].to_local())
    train(model, twin)


@case(STATE, "a DCP checkpoint of 4 ranks loads on 3 and 1, optimizer included", ranks=(4, 3, 1))
def checkpoint_world_size(fsdp, folder):
    model = shard_stack(fsdp, seeded(Stack, 0 if dist.get_world_size() == 4 else 9))
    optimizer = adamw(model)
    if dist.get_world_size() == 4:
        train_same(model, optimizer, 2)
        state = get_state_dict(model, optimizer)
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=f"{folder}/{fsdp.__name__}")
        return
    train_same(model, optimizer, 1)
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{fsdp.__name__}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train_same(model, optimizer, 2)
    reference = seeded(Stack)
    plain = adamw(reference)
    for _ in range(2):
        train_same(reference, plain, 2)
    assert_same(model, reference, rtol=1e-4, atol=1e-5)


@case(STATE, "FSDP2's checkpoints load at another world size, and the reverse", ranks=(4, 3))
def checkpoint_exchange(fsdp, folder):
    from torch.distributed import fsdp as theirs

    import fsdp_runtime

    both = {"theirs": theirs, "ours": fsdp_runtime}
    if dist.get_world_size() == 4:
        for i, (name, implementation) in enumerate(both.items()):
            state = shard_stack(implementation, seeded(Stack, i)).state_dict()
            dcp.save(state, checkpoint_id=f"{folder}/{name}")
        return
    for i, name in enumerate(both):
        model = shard_stack(fsdp, seeded(Stack, 5))
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        assert_same(model, seeded(Stack, i), rtol=0, atol=0)


@case(STATE, "a plain model's checkpoint loads into a sharded one, and the reverse", ranks=3)
def checkpoint_plain(fsdp, folder):
    model, plain = shard_stack(fsdp, seeded(Stack)), seeded(Stack, 3)
    dcp.save(plain.state_dict(), checkpoint_id=f"{folder}/plain")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/sharded")
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/plain")
    assert_same(model, seeded(Stack, 3), rtol=0, atol=0)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/sharded")
    assert_same(plain, seeded(Stack), rtol=0, atol=0)


@case(STATE, "`torch.save` and `torch.load` of a rank's state dict")
def torch_save(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    train(model, adamw(model))
    model.load_state_dict(state)
    assert_same(model, seeded(Stack), rtol=0, atol=0)


@case(
    STATE, "HSDP: state dicts hold one replica's shards; full values are right", ranks=4, since=FULL_STATE_DICTS,
)  # fmt: skip
def hsdp_state(fsdp):
    model = shard_stack(fsdp, seeded(Stack), mesh=mesh(2, 2, names=("r", "s")))
    optimizer = adamw(model)
    train(model, optimizer)
    reference = seeded(Stack)
    train_plain(reference, adamw(reference))
    found = get_model_state_dict(model, options=FULL)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@case(STATE, "`to(dtype)` after sharding", ranks=3)
def to_dtype(fsdp):
    double = partial(check_training, lambda: Stack().double(), batches=lambda step: batch(step).double())
    double(lambda model: shard_stack(fsdp, model))
    model = shard_stack(fsdp, seeded(Stack))
    model.to(torch.float64)
    reference = seeded(Stack).double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    for _ in range(2):
        for one, x in inputs(model, reference):
            mean_square(one, x.double()).backward()
        assert_same_gradients(model, reference)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


@case(
    STATE, "`to(dtype)` after the first forward, while parameters are unsharded", fsdp2=Raises(RuntimeError, "dtype"),
    ours=None,
)  # fmt: skip
def to_dtype_unsharded(fsdp):
    model = shard_stack(fsdp, seeded(Stack), reshard_after_forward=False)
    with torch.no_grad():
        model(torch.randn(2, 8))
    model.half()
    assert all_sharded(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model(torch.randn(2, 8).half()).dtype == torch.float16


@case(
    STATE, "`load_state_dict` of a wrong shape names the parameter", fsdp2=Raises(RuntimeError, r"head\.weight"),
    refusal=True,
)  # fmt: skip
def load_wrong_shape(fsdp):
    model, other = shard_stack(fsdp, seeded(Stack)), shard_stack(fsdp, seeded(lambda: Stack(3, 8, 13)))
    other.head = fsdp.fully_shard(nn.Linear(8, 5), mesh=mesh())
    try:
        model.load_state_dict(other.state_dict())
    except RuntimeError:
        train(model, adamw(model))
        raise


@case(STATE, "`state_dict` while gradients wait for a sync keeps them", since=FULL_STATE_DICTS)
def state_between(fsdp):
    model, reference = pair(fsdp)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        backward_both(model, reference, micro)
        get_model_state_dict(model, options=FULL)
    assert_same_gradients(model, reference)


@case(STATE, "a moving average (EMA) of the sharded parameters")
def moving_average(fsdp):
    model, reference = pair(fsdp)
    runs = []
    for one in (model, reference):
        average = [p.detach().clone() for p in one.parameters()]
        runs.append((one, adamw(one), average))
    for step in range(3):
        backward_both(model, reference, step)
        for one, optimizer, average in runs:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_(average, [p.detach() for p in one.parameters()], 0.1)
    for found, wanted in zip(runs[0][2], runs[1][2], strict=True):
        torch.testing.assert_close(full(found), wanted, rtol=1e-4, atol=1e-5)

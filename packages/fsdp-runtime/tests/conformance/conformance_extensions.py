"""Cases: parameters that are tensor subclasses, and say themselves what is gathered (FSDP2's all-gather extensions)."""

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from conformance_models import (
    MLP,
    Stack,
    backward_both,
    close,
    full,
    hsdp_mesh,
    mesh,
    seeded,
    shard_stack,
    world,
)
from conformance_registry import Raises, case, refusal
from extended_tensors import Halved, Wrapper, extend
from torch.testing._internal.two_tensor import TwoTensor

from ragged_shard.testing import record_collectives

EXTEND = "Tensor subclasses"


class Told(Halved):
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):  # type: ignore[override]
        self.log.append(("pre", mesh, outer_size, outer_stride, module, mp_policy))
        return (self.inner.to(torch.bfloat16),), "metadata"


class Padded(Halved):
    """Pads rows to what FSDP2's even chunks have, as its uneven chunks need."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):  # type: ignore[override]
        padded = self.inner.new_zeros(
            (math.ceil(outer_size[0] / mesh.size()), *outer_size[1:]), dtype=torch.bfloat16
        )
        padded[: self.inner.shape[0]].copy_(self.inner)
        return (padded,), "metadata"


class AsIs(Wrapper):
    """Travels and computes as it is, still a subclass."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        inner = self.inner if mp_policy.param_dtype is None else self.inner.to(mp_policy.param_dtype)
        return (inner,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            assert out.inner.untyped_storage().data_ptr() == outputs[0].untyped_storage().data_ptr()
            return None
        return type(self)(outputs[0]), outputs


def rounding(model):
    """Weights that autograd sees as they are and forward sees rounded to bf16, as those of `Halved` are."""
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            torch.nn.utils.parametrize.register_parametrization(module, "weight", _Round(), unsafe=True)
    return model


class _Round(nn.Module):
    def forward(self, weight):
        return weight + (weight.bfloat16().float() - weight).detach()


def train_alike(fsdp, **options):
    """A model of extended weights next to a plain one that rounds: the same all the way."""
    model = extend(seeded(lambda: Stack(hidden=4 * world())), Halved)
    reference = rounding(seeded(lambda: Stack(hidden=4 * world())))
    shard_stack(fsdp, model, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(3):
        backward_both(model, reference, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    names = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        twin = names.get(name)
        if twin is None:
            before, _, last = name.rpartition(".")
            twin = names[f"{before}.parametrizations.{last}.original"]
        close(full(p), twin.detach(), name, rtol=1e-4, atol=1e-5)


@case(
    EXTEND, "a subclass gathered in bf16 trains like weights rounded to bf16, resharded after forward or not"
)
def extension_trains(fsdp):
    for reshard in (None, False):
        train_alike(fsdp, reshard_after_forward=reshard)


@case(
    EXTEND, "`fsdp_pre_all_gather` with mesh (HSDP: shard axis), size, strides, module, policy", ranks=4,
)  # fmt: skip
def extension_is_told(fsdp):
    policy = fsdp.MixedPrecisionPolicy()
    for over in (mesh(), hsdp_mesh()):
        log: list[Any] = []
        model = extend(seeded(lambda: MLP(8, 8)), Told, log)
        fsdp.fully_shard(model, mesh=over, mp_policy=policy)
        model(torch.randn(2, 8))
        told = [entry[1:] for entry in log if entry[0] == "pre"]
        shards = over if over.ndim == 1 else over["shard"]
        assert [entry[0].mesh.tolist() for entry in told] == [shards.mesh.tolist()] * 2
        assert {entry[3] for entry in told} == {model.up, model.down}
        assert all(entry[1:3] == (torch.Size((8, 8)), (8, 1)) and entry[4] == policy for entry in told)


@case(
    EXTEND,
    "each gather calls `fsdp_pre_all_gather`, then `fsdp_post_all_gather`, with `out` after the first one",
)
def extension_posts(fsdp):
    log: list[Any] = []
    model = extend(nn.Linear(8, 8, bias=False), Halved, log)
    fsdp.fully_shard(model, mesh=mesh(), reshard_after_forward=True)
    for _ in range(2):
        model(torch.randn(2, 8)).sum().backward()
    assert [entry[0] for entry in log] == ["pre", "post"] * 4
    posts = [entry[1:] for entry in log if entry[0] == "post"]
    assert posts == [("metadata", torch.float32, number == 0) for number in range(4)]


@case(EXTEND, "a subclass in compute too: `fsdp_pre_all_gather` casts to `param_dtype`")
def extension_in_low_precision(fsdp):
    model = extend(seeded(lambda: MLP(8, 8)), AsIs)
    reference = seeded(lambda: MLP(8, 8)).bfloat16()
    fsdp.fully_shard(model, mesh=mesh(), mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x = torch.randn(2, 8)
    assert torch.equal(model(x), reference(x.bfloat16()))
    model.unshard()
    assert type(model.up.weight) is AsIs
    assert model.up.weight.dtype == torch.bfloat16


@case(EXTEND, "gathers in the dtype that `fsdp_pre_all_gather` returned")
def extension_on_the_wire(fsdp):
    model = extend(nn.Linear(32, 32, bias=False), Halved)
    fsdp.fully_shard(model, mesh=mesh())
    model(torch.randn(2, 32))  # the first gather may do more
    model.reshard()
    with record_collectives() as record:
        model.unshard()
    sent = sum(event.bytes_sent for event in record.events if event.kind == "all_gather")
    assert sent == 2 * 32 * 32 * (world() - 1) // world()


@case(EXTEND, "sharded parameters are the subclass, their gradients and optimizer states plain")
def extension_at_rest(fsdp):
    model = extend(nn.Linear(8, 8, bias=False), Halved)
    fsdp.fully_shard(model, mesh=mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert type(model.weight.to_local()) is Halved
    assert type(model.weight.grad.to_local()) is torch.Tensor
    assert type(optimizer.state[model.weight]["exp_avg"].to_local()) is torch.Tensor


@case(EXTEND, "from meta: `to_empty` and an initialization in place", ranks=2)
def extension_from_meta(fsdp):
    with torch.device("meta"):
        model = extend(Stack(hidden=8), Halved)
    shard_stack(fsdp, model)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.ones_(p)
    reference = Stack(hidden=8)
    for p in reference.parameters():
        nn.init.ones_(p)
    x = torch.randn(2, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    out = model(x)
    close(out, reference(x), "output", rtol=1e-5, atol=1e-5)
    out.sum().backward()
    optimizer.step()


@case(
    EXTEND, "uneven rows that `fsdp_pre_all_gather` pads itself", fsdp2=Raises(RuntimeError, "must match"), ours=None,
    note="at the second gather",
)  # fmt: skip
def extension_pads(fsdp):
    build = partial(nn.Linear, 8, 13, bias=False)
    model, reference = extend(seeded(build), Padded), seeded(build).bfloat16().float()
    fsdp.fully_shard(model, mesh=mesh())
    x = torch.randn(2, 8)
    for _ in range(2):
        close(model(x), reference(x), "output")
        model.reshard()


class Uncalled(Halved):
    """`__tensor_unflatten__` is for torch.compile alone: FSDP2 makes slices by ops."""

    @staticmethod
    def __tensor_unflatten__(inner_tensors, outer_size, outer_stride):  # type: ignore[override]
        return inner_tensors["inner"]


@case(EXTEND, "any `__tensor_unflatten__`: slices are made by ops of the subclass too")
def extension_by_ops(fsdp):
    model, reference = extend(seeded(lambda: MLP(8, 8)), Uncalled), seeded(lambda: MLP(8, 8))
    with torch.no_grad():
        for linear in (reference.up, reference.down):
            linear.weight.copy_(linear.weight.bfloat16())
    fsdp.fully_shard(model, mesh=mesh(), reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(2, 8)
    close(model(x), reference(x), "output")
    model(x).sum().backward()
    before = full(model.up.weight).clone()
    optimizer.step()
    assert type(model.up.weight.to_local()) is Uncalled
    assert not torch.equal(full(model.up.weight), before)
    model.reshard()
    assert not torch.equal(model(x), reference(x))


@case(EXTEND, "a state dict shows the subclass's values and loads again")
def extension_state_dict(fsdp):
    model = extend(seeded(lambda: nn.Linear(8, 8, bias=False)), Halved)
    fsdp.fully_shard(model, mesh=mesh())
    kept = copy.deepcopy({key: full(value) for key, value in model.state_dict().items()})
    saved = {key: value.detach().clone() for key, value in model.state_dict().items()}
    assert torch.equal(kept["weight"], seeded(lambda: nn.Linear(8, 8, bias=False)).weight)
    with torch.no_grad():
        model.weight.zero_()
    model.load_state_dict(saved)
    assert torch.equal(full(model.weight), kept["weight"])


class OnlyPre(Wrapper):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner,), None


class Doubled(TwoTensor):
    def fsdp_pre_all_gather(self, mesh):
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (Doubled(*outputs), outputs)


def use_two_tensors(fsdp):
    model, plain = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
    plain.load_state_dict(model.state_dict())
    weight = model.weight.detach()
    model.weight = nn.Parameter(Doubled(weight.clone(), weight.clone()))
    fsdp.fully_shard(model, mesh=mesh())
    x = torch.randn(2, 8)
    assert torch.equal(model(x).a, plain(x))


refusal(
    EXTEND, "one of the two methods alone is refused",
    lambda fsdp: fsdp.fully_shard(extend(nn.Linear(8, 8), OnlyPre), mesh=mesh()),
    Raises(AssertionError, "Both"), Raises(AssertionError, "both"),
)  # fmt: skip
refusal(
    EXTEND, "a subclass of two tensors", use_two_tensors, None,
    Raises(NotImplementedError, "weight is a Doubled of 2 tensors"), note="use `quantization_policy=`",
)  # fmt: skip


@case(
    EXTEND, "`reshard_after_forward=2` with a subclass is refused", ranks=4, fsdp2=Raises(NotImplementedError, ""),
    ours=Raises(NotImplementedError, "weight"), note="FSDP2 in the first backward",
)  # fmt: skip
def extension_among_neighbors(fsdp):
    model = nn.Sequential(extend(nn.Linear(8, 8), Halved))
    fsdp.fully_shard(model[0], mesh=mesh(), reshard_after_forward=2)
    fsdp.fully_shard(model, mesh=mesh())
    model(torch.randn(2, 8)).sum().backward()


@case(
    EXTEND, "the two methods set on a local tensor after wrapping", ours=Raises(NotImplementedError, "weight"),
    note="pass a subclass", refusal=True,
)  # fmt: skip
def extension_by_hand(fsdp):
    model = nn.Linear(8, 8, bias=False)
    fsdp.fully_shard(model, mesh=mesh())
    weight: Any = model.weight
    local, called = weight._local_tensor, []

    def pre(mesh):
        called.append(mesh)
        return (local.detach(),), None

    def post(outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (outputs[0], outputs)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post
    model(torch.randn(2, 8))
    assert called

"""Cases: dtypes of compute, reduction, inputs and outputs; parameters offloaded to the CPU."""

import dataclasses

import torch
import torch.nn as nn
from conformance_models import (
    MLP,
    Stack,
    assert_same_gradients,
    backward_both,
    batch,
    check_training,
    close,
    full,
    mean_square,
    mesh,
    mine,
    pair,
    seeded,
    shard_stack,
)
from conformance_registry import Raises, case, refusal
from runtime_helpers import PolicyOf215

from ragged_shard.testing import record_collectives

PRECISION = "Mixed precision"
OFFLOAD = "Offload"
LOW = torch.bfloat16


class Spy(MLP):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.zeros(8))
        self.met = []

    def forward(self, x, extra=None):
        self.met.append((self.up.weight.dtype, x.dtype, self.offset.dtype))
        self.extra = extra
        return super().forward(x.to(self.up.weight.dtype))


def reduced_bytes(fsdp, **dtypes):
    """What a rank sends in the reduce-scatters of a backward."""
    model = shard_stack(fsdp, seeded(Stack), mp_policy=fsdp.MixedPrecisionPolicy(**dtypes))
    loss = model(torch.randn(4, 8)).float().sum()
    with record_collectives() as record:
        loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return sum(event.bytes_sent for event in record.events if event.kind == "reduce_scatter")


@case(
    PRECISION, "`param_dtype`: computes in it; sharded parameters, gradients and buffers keep theirs", ranks=3
)
def param_dtype(fsdp):
    model = fsdp.fully_shard(seeded(Spy), mesh=mesh(), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=LOW))
    out = model(torch.randn(4, 8))
    assert out.dtype == LOW
    assert model.met == [(LOW, LOW, torch.float32)]
    out.sum().backward()
    assert (
        {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    )


@case(PRECISION, "`param_dtype` gives the bits of a low-precision copy of the model")
def param_dtype_values(fsdp):
    model, _ = pair(fsdp, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=LOW))
    low = seeded(Stack).to(LOW)
    x = torch.randn(4, 8)
    found, wanted = model(x), low(x.to(LOW))
    assert torch.equal(found, wanted)
    found.sum().backward()
    wanted.sum().backward()
    assert_same_gradients(model, low.float(), rtol=2e-2, atol=1e-2)


@case(
    PRECISION,
    "`reduce_dtype`: gradients travel in it; without it in `param_dtype`, from torch 2.15 on in the parameters'",
)
def reduce_dtype(fsdp):
    in_fp32 = reduced_bytes(fsdp)
    assert reduced_bytes(fsdp, param_dtype=LOW, reduce_dtype=torch.float32) == in_fp32
    since_2_15 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    share = 1.0 if since_2_15 else 0.6  # half, and padding to 16 bytes
    assert reduced_bytes(fsdp, param_dtype=LOW) <= in_fp32 * share
    assert reduced_bytes(fsdp, reduce_dtype=LOW) <= in_fp32 * 0.6


class WithNorm(nn.Module):
    """A norm in fp32 between layers in another dtype."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.norm(self.inner(x).float()).to(self.head.weight.dtype))


@case(
    PRECISION, "`param_dtype_override_fn`: parameters that keep their dtype in a unit that computes in another",
    ranks=3, new=(2, 15),
)  # fmt: skip
def param_dtype_override_fn(fsdp):
    model, reference = seeded(WithNorm), seeded(WithNorm)
    kept = {*model.norm.parameters()}
    policy = PolicyOf215(LOW, torch.float32, param_dtype_override_fn=lambda p: p.dtype if p in kept else None)
    fsdp.fully_shard(model, mesh=mesh(), mp_policy=policy)
    for layer in (reference.inner, reference.head):
        layer.to(LOW)
    whole = batch()
    mean_square(model, mine(whole)).backward()
    mean_square(reference, whole.to(LOW)).backward()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert_same_gradients(model, reference.float(), rtol=2e-2, atol=1e-3)


@case(PRECISION, "`grad_dtype` of a parameter before `fully_shard`: of its sharded gradient", new=(2, 15))
def grad_dtype(fsdp):
    model, reference = seeded(MLP), seeded(MLP)
    model.up.weight.grad_dtype = LOW
    fsdp.fully_shard(model, mesh=mesh())
    for step in range(2):
        backward_both(model, reference, step)
    kept, others = model.up.weight, [p for p in model.parameters() if p is not model.up.weight]
    assert kept.grad.dtype == kept.grad_dtype == LOW
    assert {p.grad.dtype for p in others} == {torch.float32}
    close(full(kept.grad).float(), reference.up.weight.grad, "gradient", rtol=2e-2, atol=1e-3)


@case(PRECISION, "bf16 compute with fp32 reduce: the mean of bf16 gradients, not rounded again", ranks=3)
def reduce_in_fp32(fsdp):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    model = shard_stack(fsdp, seeded(Stack), mp_policy=policy)
    whole = batch()
    mean_square(model, mine(whole)).backward()
    wanted = [torch.zeros_like(p) for p in seeded(Stack).parameters()]
    parts = whole.chunk(3)
    for part in parts:
        low = seeded(Stack).to(LOW)
        mean_square(low, part.to(LOW)).backward()
        for total, p in zip(wanted, low.parameters(), strict=True):
            total += p.grad.float() / 3
    for p, total in zip(model.parameters(), wanted, strict=True):
        close(full(p.grad), total, "gradient", rtol=1e-6, atol=1e-7)


@case(PRECISION, "without sync, gradients add up in `reduce_dtype`")
def accumulate_in_fp32(fsdp):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    model = fsdp.fully_shard(nn.Linear(4, 3, bias=False), mesh=mesh(), mp_policy=policy)
    for x, last in ((256.0, False), (1.0, True)):  # 257 is no bf16 number
        model.set_requires_gradient_sync(last)
        model(torch.full((1, 4), x)).sum().backward()
    assert (full(model.weight.grad) == 257).all(), full(model.weight.grad)


@case(PRECISION, "`output_dtype`, in nested outputs too")
def output_dtype(fsdp):
    class Many(MLP):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "more": [y, 3, torch.arange(2)], "none": None}

    policy = fsdp.MixedPrecisionPolicy(param_dtype=LOW, output_dtype=torch.float32)
    out = fsdp.fully_shard(Many(), mesh=mesh(), mp_policy=policy)(torch.randn(2, 8))
    assert out["y"].dtype == out["more"][0].dtype == torch.float32
    assert out["more"][2].dtype == torch.int64
    out["y"].sum().backward()


@dataclasses.dataclass
class Bundle:
    x: torch.Tensor
    n: int


@case(
    PRECISION,
    "floating-point inputs are cast, nested ones and keywords too, unless `cast_forward_inputs=False`",
)
def cast_inputs(fsdp):
    model = fsdp.fully_shard(Spy(), mesh=mesh(), mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=LOW))
    model(torch.randn(2, 8), extra={"a": [torch.randn(2), torch.arange(2)], "b": "text"})
    assert model.extra["a"][0].dtype == LOW
    assert model.extra["a"][1].dtype == torch.int64
    model(x=torch.randn(2, 8), extra=Bundle(torch.randn(2), 3))
    assert model.extra.x.dtype == LOW
    assert isinstance(model.extra, Bundle)
    assert model.extra.n == 3
    policy = fsdp.MixedPrecisionPolicy(param_dtype=LOW, cast_forward_inputs=False)
    model = fsdp.fully_shard(Spy(), mesh=mesh(), mp_policy=policy)
    model(torch.randn(2, 8))
    assert model.met == [(LOW, torch.float32, torch.float32)]


@case(PRECISION, "a norm kept in fp32 in a separate unit")
def norm_in_fp32(fsdp):
    met = []

    class Norm(nn.LayerNorm):
        def forward(self, x):
            met.append((x.dtype, self.weight.dtype))
            return super().forward(x)

    model = seeded(lambda: nn.Sequential(MLP(), Norm(8), MLP()))
    low = fsdp.MixedPrecisionPolicy(param_dtype=LOW)
    fsdp.fully_shard(
        model[1],
        mesh=mesh(),
        mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=LOW),
    )
    for i in (0, 2):
        fsdp.fully_shard(model[i], mesh=mesh(), mp_policy=low)
    fsdp.fully_shard(model, mesh=mesh(), mp_policy=low)
    out = model(torch.randn(4, 8))
    assert met == [(torch.float32, torch.float32)]
    assert out.dtype == LOW
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@case(PRECISION, "bf16 parameters without a policy: everything in bf16")
def low_parameters(fsdp):
    model, reference = pair(fsdp, lambda: Stack().to(LOW))
    x = torch.randn(4, 8, dtype=LOW)
    assert torch.equal(model(x), reference(x))
    model(x).sum().backward()
    reference(x).sum().backward()
    for p, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad.dtype == LOW
        assert torch.equal(full(p.grad), wanted.grad)


@case(PRECISION, "policies are torch's own classes", since=(2, 13))
def policy_classes(fsdp):
    import torch.distributed.fsdp as theirs

    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims"):
        assert getattr(fsdp, name) is getattr(theirs, name)
    assert set(FSDP2_NAMES) <= set(dir(fsdp))


FSDP2_NAMES = (
    "CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "fully_shard", "MixedPrecisionPolicy", "OffloadPolicy",
    "register_fsdp_forward_method", "UnshardHandle", "share_comm_ctx",
)  # fmt: skip


@case(PRECISION, "fp16 with a `GradScaler`: one rank's infinity skips the step everywhere", ranks=3)
def grad_scaler(fsdp):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = shard_stack(fsdp, seeded(Stack), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    before = [full(p).clone() for p in model.parameters()]
    for poison in (True, False):
        optimizer.zero_grad()
        x = torch.randn(4, 8)
        if poison and torch.distributed.get_rank() == 1:
            x[0, 0] = float("inf")
        scaler.scale(mean_square(model, x)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(full(p), old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(same) if poison else not any(same), (poison, same)
        assert scaler.get_scale() == 128.0


@case(OFFLOAD, "`CPUOffloadPolicy`: the same training", ranks=3)
def cpu_offload(fsdp):
    for pin in (True, False):
        policy = fsdp.CPUOffloadPolicy(pin_memory=pin and torch.cuda.is_available())
        model = check_training(Stack, lambda m, p=policy: shard_stack(fsdp, m, offload_policy=p))
        mean_square(model, torch.randn(4, 8)).backward()
        assert all(p.device.type == p.grad.device.type == "cpu" for p in model.parameters())


@case(OFFLOAD, "`CPUOffloadPolicy` with accumulation without sync and with mixed precision")
def cpu_offload_accumulates(fsdp):
    policy = fsdp.CPUOffloadPolicy(pin_memory=False)
    mixed = fsdp.MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    for mp in (fsdp.MixedPrecisionPolicy(), mixed):
        model, reference = pair(fsdp, offload_policy=policy, mp_policy=mp)
        for micro in range(3):
            model.set_requires_gradient_sync(micro != 0)
            backward_both(model, reference, micro)
        assert_same_gradients(model, reference, **({} if mp is not mixed else {"rtol": 0.05, "atol": 0.02}))


refusal(
    OFFLOAD, "an `offload_policy` of another type is refused",
    lambda fsdp: fsdp.fully_shard(MLP(), mesh=mesh(), offload_policy="cpu"), None,
    Raises(TypeError, "offload_policy"), better="FSDP2 silently does not offload",
)  # fmt: skip

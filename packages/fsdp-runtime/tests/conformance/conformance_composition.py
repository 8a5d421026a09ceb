"""Cases: beside activation checkpointing, torch.compile, tensor parallelism, clipping, optimizers, profilers."""

from functools import partial

import torch
import torch.nn as nn
from conformance_models import (
    MLP,
    Stack,
    assert_same,
    assert_same_gradients,
    backward_both,
    batch,
    check_backward,
    check_training,
    close,
    full,
    mean_square,
    mesh,
    mine,
    pair,
    seeded,
    shard_stack,
    stack_of,
)
from conformance_registry import Raises, case
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

COMPOSE = "With other parts of torch"
OPTIMIZE = "Clipping, scaling, optimizers"
LABELS = "Profiling"


class Noisy(MLP):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.3))


@case(
    COMPOSE, "activation checkpointing: `torch.utils.checkpoint` around each unit, reentrant or not, or inside; the "
    "composable `checkpoint(module)` before `fully_shard`", ranks=3,
)  # fmt: skip
def checkpoint_function(fsdp):
    class Recomputing(Stack):
        reentrant = False

        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
            return self.head(x)

    class Reentrant(Recomputing):
        reentrant = True

    class Inside(MLP):
        def forward(self, x):
            return self.down(checkpoint(self.up, x, use_reentrant=False).tanh())

    def composable():
        model = Stack()
        for block in model.blocks:
            composable_checkpoint(block)
        return model

    def loss(model, x):
        return mean_square(model, x.requires_grad_())

    cases = ((Recomputing, True), (Recomputing, False), (Reentrant, None), (composable, None))
    for build, reshard in (*cases, (partial(stack_of, Inside), None)):
        check_training(build, lambda m, r=reshard: shard_stack(fsdp, m, reshard_after_forward=r), loss=loss)


@case(COMPOSE, "activation checkpointing: `checkpoint_wrapper` inside a unit, with dropout")
def checkpoint_wrapped(fsdp):
    def wrap(model):
        for i in range(3):
            model.blocks[i] = checkpoint_wrapper(model.blocks[i])
        shard_stack(fsdp, model)

    model = seeded(Stack)
    wrap(model)
    check_backward(model, seeded(Stack))
    gradients = []
    for apply in (wrap, lambda model: shard_stack(fsdp, model)):
        model = seeded(partial(stack_of, Noisy))
        apply(model)
        torch.manual_seed(5)
        mean_square(model, mine(batch())).backward()
        gradients.append([full(p.grad) for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        close(one, other, "with dropout")


@case(
    COMPOSE, "`torch.compile` of blocks before or after sharding, or of the whole with graph breaks", timeout=120,
)  # fmt: skip
def compiled(fsdp):
    def blocks(model):
        for block in model.blocks:
            block.compile(backend="aot_eager")

    shard = partial(shard_stack, fsdp)
    for steps in (
        (blocks, shard),
        (shard, blocks),
        (shard, lambda model: model.compile(backend="aot_eager")),
    ):
        check_training(lambda: Stack(2), lambda model, s=steps: [step(model) for step in s], steps=2)


@case(COMPOSE, "tensor parallelism on the other axis of a 2-D mesh", ranks=4)
def tensor_parallel(fsdp):
    over = mesh(2, 2, names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    build = lambda: nn.Sequential(MLP(hidden=12), MLP(hidden=12))  # noqa: E731
    model, reference = seeded(build), seeded(build)
    for block in model:
        parallelize_module(block, over["tp"], plan)
        fsdp.fully_shard(block, mesh=over["dp"])
    fsdp.fully_shard(model, mesh=over["dp"])
    for p in model.parameters():
        assert p.device_mesh.mesh_dim_names == ("dp", "tp")
        assert len(p.placements) == 2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        whole = batch(step)[:8]
        mean_square(model, whole.chunk(2)[over.get_local_rank("dp")]).backward()
        mean_square(reference, whole).backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, reference)


@case(COMPOSE, "autocast around a sharded model")
def autocast(fsdp):
    model, reference = pair(fsdp)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = model(x), reference(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(found, wanted)
    found.sum().backward()


@case(COMPOSE, "a pipeline of two stages, each a root, with `share_comm_ctx`")
def pipeline(fsdp):
    plain = [seeded(Stack), seeded(lambda: nn.Linear(3, 2))]
    stages = [
        shard_stack(fsdp, seeded(Stack)),
        fsdp.fully_shard(seeded(lambda: nn.Linear(3, 2)), mesh=mesh()),
    ]
    fsdp.share_comm_ctx(stages)
    wholes = [batch(i) for i in range(3)]
    for chain, part in ((stages, mine), (plain, lambda x: x)):
        losses = [chain[1](chain[0](part(x))).square().mean() for x in wholes]
        for loss in losses:
            loss.backward()
    for stage, reference in zip(stages, plain, strict=True):
        assert_same_gradients(stage, reference)


def clip_both(fsdp, foreach=None, norm=2.0, **options):
    model, reference = pair(fsdp, **options)
    backward_both(model, reference)
    ours = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type=norm, foreach=foreach)
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 1e-2, norm_type=norm)
    close(full(ours), wanted, f"norm {norm}")
    assert_same_gradients(model, reference)


@case(OPTIMIZE, "`clip_grad_norm_`: the norm over all ranks, foreach and not", ranks=3)
def clip(fsdp):
    for foreach, norm in ((None, 2.0), (True, float("inf")), (False, 2.0), (False, 1.0)):
        clip_both(fsdp, foreach, norm)


@case(OPTIMIZE, "`clip_grad_norm_` with HSDP: replicas are counted once", ranks=4)
def clip_hsdp(fsdp):
    clip_both(fsdp, mesh=mesh(2, 2, names=("r", "s")))


@case(
    OPTIMIZE, "`clip_grad_norm_(error_if_nonfinite=True)` raises on every rank",
    fsdp2=Raises(RuntimeError, "non-finite"), refusal=True,
)  # fmt: skip
def clip_nonfinite(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    x = torch.randn(4, 8)
    if torch.distributed.get_rank() == 1:
        x[0] = float("nan")
    mean_square(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@case(OPTIMIZE, "Adam, AdamW, SGD, Adagrad: for-loop, foreach and fused", ranks=3)
def optimizers(fsdp):
    for kind, options in (
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {}),
    ):
        check_training(
            lambda: Stack(1),
            lambda model: shard_stack(fsdp, model),
            optimizer=lambda params, kind=kind, options=options: kind(params, lr=1e-3, **options),
            steps=2,
            rtol=1e-3,
            atol=1e-4,  # of steps of 1e-3: the first of Adam's divides small gradients by themselves
        )


@case(OPTIMIZE, "fused SGD", fsdp2=Raises(NotImplementedError, "_fused_sgd_"), ours=None)
def fused_sgd(fsdp):
    check_training(
        Stack,
        lambda model: shard_stack(fsdp, model),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    )


@case(
    OPTIMIZE, "an optimizer that was built before `fully_shard`",
    ours=Raises(RuntimeError, r"before fully_shard.*[Bb]uild"),
    better="its first step raises; FSDP2 silently trains nothing", refusal=True,
)  # fmt: skip
def optimizer_before(fsdp):
    errors = []
    choices: tuple[dict, ...] = ({}, {"fused": True})
    for options in choices:
        model = seeded(Stack)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        shard_stack(fsdp, model)
        before = [full(p).clone() for p in model.parameters()]
        mean_square(model, batch()).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            errors.append(error)
        for p, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(full(p), old), options
    if errors:
        assert ["weight" in str(error) for error in errors] == [True, True]
        raise errors[0]


@case(OPTIMIZE, "learning-rate schedules and several parameter groups", ranks=2)
def schedule(fsdp):
    model, reference = pair(fsdp)
    runs = []
    for one in (model, reference):
        groups = [
            {"params": [p for p in one.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in one.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        runs.append((one, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)))
    for step in range(4):
        backward_both(model, reference, step)
        for _, optimizer, scheduler in runs:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert_same(model, reference)


LABELLED = (
    "FSDP::pre_forward", "FSDP::post_forward", "FSDP::all_gather", "FSDP::pre_backward", "FSDP::post_backward_reduce",
    "FSDP::root_pre_forward", "FSDP::root_post_backward_callback", "FSDP::post_backward_reshard",
)  # fmt: skip


@case(
    LABELS,
    "the profiler sees " + ", ".join(f"`{label}`" for label in LABELLED) + "; a unit's label has its name",
)
def labels(fsdp):
    model = shard_stack(fsdp, seeded(Stack))
    model(torch.randn(4, 8)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.randn(4, 8)).sum().backward()
    seen = {event.name for event in profile.events()}
    for label in LABELLED:
        assert any(name == label or name.startswith(f"{label} (") for name in seen), label
    for label in ("all_gather", "post_backward_reduce", "pre_forward"):
        assert f"FSDP::{label} (blocks.1)" in seen, sorted(n for n in seen if label in n)

"""Runs of Shampoo and SOAP over loose parameters in many layouts. Everything here also runs on ranks."""

import logging
import random

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from block_optim import SOAP, Shampoo
from layout_planner import Rows, TensorSpec, plan
from ragged_shard import RaggedShard, distribute_tensor
from ragged_shard.testing import record_collectives

# Square, tall, odd, stacked experts, a convolution, a vector, a scalar, a single row.
SHAPES = ((8, 8), (22, 5), (7, 11), (3, 6, 5), (6, 2, 3, 2), (9,), (), (1, 7))
OPTIMIZERS: dict[str, type[Shampoo] | type[SOAP]] = {"shampoo": Shampoo, "soap": SOAP}
DIM = 4


def tensors(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def cut(rng, total, ranks):
    """Random shares of `total`, many of them empty."""
    points = sorted(rng.choice([0, total, rng.randint(0, total)]) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *points], [*points, total], strict=True))


def planned_units(ranks, shapes=SHAPES, kind="shampoo"):
    """Units of each tensor in a buffer that the planner laid out under the optimizer's block policy."""
    policy = OPTIMIZERS[kind].block_policy(max_preconditioner_dim=DIM)
    specs = []
    for i, shape in enumerate(shapes):
        block = policy(f"p{i}", torch.empty(shape))
        specs.append(TensorSpec(f"p{i}", shape, Rows(1) if block is None else block))
    layout = plan(specs, ranks, align=1)
    return [tuple(b - a for a, b in (layout.local_range(s.name, r) for r in range(ranks))) for s in specs]


def placements(layout, ranks, seed=0, shapes=SHAPES):
    """The placement of each tensor on the axis of `ranks` ranks."""
    rng = random.Random(f"{layout} {ranks} {seed}")
    if layout == "planned":
        units = planned_units(ranks, shapes)
        return [RaggedShard(tuple(range(len(s))), u) for s, u in zip(shapes, units, strict=True)]
    if layout == "shard":
        return [Shard(0) if s else Replicate() for s in shapes]
    found = []
    for shape in shapes:
        numel = torch.Size(shape).numel()
        if layout == "rows" and shape:
            found.append(RaggedShard((0,), cut(rng, shape[0], ranks)))
        elif layout == "elements" and shape:
            found.append(RaggedShard(tuple(range(len(shape))), cut(rng, numel, ranks)))
        else:
            one = rng.randrange(ranks)
            found.append(RaggedShard(tuple(range(len(shape))), [int(r == one) for r in range(ranks)]))
    return found


def placed(full, mesh, placement):
    if mesh is None:
        return full.clone()
    every = [Replicate()] * (mesh.ndim - 1) + [placement]
    if isinstance(placement, (Shard, Replicate)):
        return torch_distribute(full, mesh, every)
    return distribute_tensor(full, mesh, every)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Run:
    """Parameters in a layout, with an optimizer; steps take gradients from the step's number."""

    def __init__(self, kind, layout="plain", mesh=None, seed=0, shapes=SHAPES, **options):
        self.mesh, self.shapes = mesh, shapes
        ranks = 1 if mesh is None else mesh.size(mesh.ndim - 1)
        self.placements = [None] * len(shapes) if mesh is None else placements(layout, ranks, seed, shapes)
        self.params = [
            torch.nn.Parameter(p)
            for p in map(placed, tensors(0, shapes), [mesh] * len(shapes), self.placements)
        ]
        named = [(f"p{i}", p) for i, p in enumerate(self.params)]
        options = {"lr": 0.05, "precondition_frequency": 2, "max_preconditioner_dim": DIM, **options}
        self.optimizer = OPTIMIZERS[kind](named, **options)

    def step(self, number, without=(), spoil=None, **step_options):
        for i, (param, grad, placement) in enumerate(
            zip(self.params, tensors(100 + number, self.shapes), self.placements, strict=True)
        ):
            if i == spoil:
                grad = torch.full_like(grad, torch.nan)
            param.grad = None if i in without else placed(grad, self.mesh, placement)
        self.optimizer.step(**step_options)

    def result(self):
        """Everything there is, in full."""
        found = [p.detach() for p in self.params]
        for param in self.params:
            state = self.optimizer.state[param]
            found += [state[k] for k in sorted(state)]
        return [whole(tensor).clone() for tensor in found]


def mesh_of(*shape):
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def reference(kind, steps=6, **options):
    """The same run in this process alone."""
    run = Run(kind, **options)
    for number in range(steps):
        run.step(number)
    return run.result()


def many_runs(runs, steps=6):
    """Results of (kind, layout, mesh shape, seed, options) one after the other, from rank 0."""
    logging.disable(logging.WARNING)
    found = []
    for kind, layout, shape, seed, options in runs:
        run = Run(kind, layout, mesh_of(*shape), seed, **options)
        for number in range(steps):
            run.step(number)
        result = run.result()
        found.append(result if dist.get_rank() == 0 else None)
    return found


def collectives_of(kind, layout, options, step_options):
    """Kinds and bytes of the collectives of a step, what the optimizer says it sends, and its warnings."""
    logging.disable(logging.NOTSET)  # ranks stay, and other jobs have switched warnings off
    messages: list[str] = []

    class Messages(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Messages()
    logging.getLogger("block_optim").addHandler(handler)
    try:
        run = Run(kind, layout, mesh_of(), **options)
    finally:
        logging.getLogger("block_optim").removeHandler(handler)
    run.step(0, **step_options)
    with record_collectives() as record:
        optimizer_step(run, 1, step_options)
    sent = sum(e.bytes_sent for e in record.events if e.kind == "all_to_all")
    return record.kinds, sent, run.optimizer.bytes_per_step, messages


def optimizer_step(run, number, step_options):
    for param, grad, placement in zip(
        run.params, tensors(100 + number, run.shapes), run.placements, strict=True
    ):
        # The rank's own part, without the scatter that distributes a full gradient.
        param.grad = local_part(grad, run.mesh, placement)
    run.optimizer.step(**step_options)


def local_part(full, mesh, placement):
    every = [placement]
    if isinstance(placement, (Shard, Replicate)):
        return torch_distribute(full, mesh, every, src_data_rank=None)
    return distribute_tensor(full, mesh, every, src_data_rank=None)


def missing_and_bad(kind, layout):
    """A run in which gradients are missing for all, missing on some ranks, and not finite on one."""
    logging.disable(logging.ERROR)
    run = Run(kind, layout, mesh_of())
    for number in range(3):
        run.step(number)
    run.step(3, without=(0, 4))
    run.step(4, spoil=2)
    for param, grad, placement in zip(run.params, tensors(105), run.placements, strict=True):
        param.grad = placed(grad, run.mesh, placement)
    run.optimizer.step()
    return run.result(), run.optimizer.skipped_steps


def absent_on_some(kind):
    """The second parameter's gradient is missing on ranks that hold some of it: it counts as zero there."""
    logging.disable(logging.ERROR)
    run = Run(kind, "shard", mesh_of(), shapes=((9, 4), (6, 5)))
    for number in range(4):
        for i, (param, grad, placement) in enumerate(
            zip(run.params, tensors(100 + number, run.shapes), run.placements, strict=True)
        ):
            param.grad = placed(grad, run.mesh, placement)
            if i == 1 and dist.get_rank() > 0:
                param.grad = None
        run.optimizer.step(grad_norm=1.0)
    return run.result()


def refusal(kind):
    """What building an optimizer says of a parameter that is cut along its columns."""
    value = torch_distribute(torch.zeros(4, 6), mesh_of(), [Shard(1)], src_data_rank=None)
    try:
        OPTIMIZERS[kind]([("head", torch.nn.Parameter(value))])
    except ValueError as error:
        return str(error)
    return None

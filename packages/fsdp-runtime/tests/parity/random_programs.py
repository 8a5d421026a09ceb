"""Random training scripts: what a user does with a model between two updates, in any order, sharded or in one process.

Every rank draws the same program. In one process the loss is the mean of all ranks' losses. `check_races` runs one rank
of a program on the simulated device.
"""

import contextlib
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from runtime_helpers import Body, device, mesh_of, seeded
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import block_optim
import fsdp_runtime
from fsdp_runtime import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, block_policies, fully_shard
from fsdp_runtime._plan import group
from fsdp_runtime.memory import SelectiveOffloadPolicy

VOCABULARY, ROWS = 11, 2  # rows per rank
DOUBLE = torch.float64  # sums that lose nothing can be compared with those of one process
PRECISIONS = [(None, None), (DOUBLE, DOUBLE), (DOUBLE, torch.float32), (None, DOUBLE)]
OFFLOADS = (OffloadPolicy(), CPUOffloadPolicy(), SelectiveOffloadPolicy(activations=True))
POLICIES = (None, block_policies.rows(4), block_policies.tiles(3, 3), block_policies.whole())
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
    "block_optim": lambda params: block_optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1),
}
ACTIONS = (
    *("train",) * 6, "accumulate", "accumulate_unreduced", "two_forwards", "two_losses", "other_blocks", "one_block",
    "clip", "look", "fail_in_forward", "fail_in_backward", "gather", "free", "keep_after_forward",
    "keep_after_backward", "freeze", "zero", "save_and_load", "move_away_and_back", "edit", "export", "prefetch",
    "copy_late", "other_group", "new_optimizer", "accumulate_partial", "divide", "twice_through", "edit_gradients",
    "edit_shards", "end_by_hand", "max_buffers", "keep_memory", "sum_only", "without_head", "chunked_loss",
)  # fmt: skip


class Block(nn.Module):
    """A layer, awkward parameters, and experts of which a rank runs any, any number of times."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(()))
        self.turned = nn.Parameter(torch.randn(3, width).t())
        self.register_buffer("shift", torch.randn(width))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        x = x + self.scale * torch.tanh(self.first(x) + self.shift)
        x = x + torch.tanh(x @ self.turned) @ self.turned.t()
        for index in chosen:
            x = x + torch.tanh(self.experts[index](x))
        return x


class Model(Body):
    """Its middle can be recomputed, left out or broken; its ends can be used in other places too.

    Args:
        ends: "twice": the head is used before the blocks too; "functional": the embedding's weight is, after them.
    """

    def __init__(self, recompute: bool, width: int, ends: str, **options: Any):
        super().__init__(width=width, **options)
        self.recompute, self.ends = recompute, ends
        self.fails: int | None = None  # after this block
        self.blocks = nn.ModuleList(Block(width) for _ in self.blocks)

    def forward(
        self, tokens: torch.Tensor, order: Any = None, chosen: Sequence[int] = (), head: bool = True
    ) -> Any:
        x = self.embed(tokens)
        if self.ends == "twice":
            x = x + self.head(x).mean(-1, keepdim=True)
        for index in order or range(len(self.blocks)):
            block = self.blocks[index]
            x = checkpoint(block, x, chosen, use_reentrant=False) if self.recompute else block(x, chosen)
            if index == self.fails:
                raise KeyError("on purpose")
        x = self.norm(x)
        if self.ends == "functional":
            x = x + nn.functional.linear(x, self.embed.weight).mean(-1, keepdim=True)
        return self.head(x) if head else x


class Program:
    """One program with its model and optimizer; `trace` has the values to compare, with what they are.

    Args:
        seed: of all that is drawn: the model, how it is sharded, and the actions.
        sharded: whether it is; else this rank computes all by itself.
        offload_policy: of units that no rank skips.
    """

    def __init__(self, seed: int, sharded: bool, offload_policy: OffloadPolicy = OFFLOADS[0]):
        self.rng = rng = random.Random(seed)
        self.seed, self.sharded, self.batches = seed, sharded, 0
        self.ranks = dist.get_world_size()
        self.trace: list[tuple[str, torch.Tensor | None]] = []
        options = {
            "width": rng.choice((5, 8)),
            "blocks": rng.choice((1, 2, 3)),
            "recompute": rng.random() < 0.3,
            "ends": rng.choice(("", "", "twice", "functional")),
        }
        self.model: Any = seeded(Model, seed, vocab=VOCABULARY, tied=rng.random() < 0.3, **options)
        self.skippable, self.failed = rng.random() < 0.5, False
        self.large = rng.choice((1, group.MIN_CHILD))  # elements of children that are freed and reduced early
        self.units = self.shard(self.draw_units(), offload_policy)
        self.make_optimizer = OPTIMIZERS[rng.choice(list(OPTIMIZERS))]
        self.optimizer = self.make_optimizer(self.model.parameters())

    def draw_units(self) -> list[tuple[Any, dict[str, Any]]]:
        """The modules, or lists of modules, that become units, and the options of each."""
        rng, wide = self.rng, self.ranks == 4
        self.shape = rng.choice(((4,), (2, 2), (2, 2), (1, 4)) if wide else ((self.ranks,), (self.ranks, 1)))
        precision = MixedPrecisionPolicy(*rng.choice(PRECISIONS))
        among = [True, False, None] + [2] * (self.shape[-1] == 4)
        units: list[tuple[Any, dict[str, Any]]] = []
        for block in self.model.blocks:
            if self.skippable or rng.random() < 0.4:
                units += [(expert, {"skippable": self.skippable}) for expert in block.experts]
            units += [(block, {})] * (rng.random() < 0.85)
        ends = [self.model.embed if self.model.head.weight is self.model.embed.weight else self.model.norm]
        self.ends_together = not self.model.ends and rng.random() < 0.3
        units += [([*ends, self.model.head], {})] * self.ends_together
        units.append((self.model, {}))
        if rng.random() < 0.3:
            rng.shuffle(units)
        for _, own in units:
            own |= {"reshard_after_forward": rng.choice(among), "block_policy": rng.choice(POLICIES)}
            own["mp_policy"] = precision
        return units

    def shard(self, units: list[tuple[Any, dict[str, Any]]], offload: OffloadPolicy) -> list[Any]:
        mesh = mesh_of(*self.shape) if self.sharded else None
        for module, options in units if self.sharded else ():
            kept = OFFLOADS[0] if options.get("skippable") else offload
            with mock.patch.object(group, "MIN_CHILD", self.large):
                fully_shard(module, mesh=mesh, offload_policy=kept, **options)
        return [module if isinstance(module, nn.Module) else module[-1] for module, _ in units]

    def run(self, actions: int) -> None:
        for index in range(actions):
            action = self.rng.choice(ACTIONS)
            keeps = self.rng.random() < 0.15  # the gradients for what comes next
            with mock.patch.object(group, "MIN_CHILD", self.large):
                no_update = getattr(self, action)() or keeps
            if no_update:
                continue
            self.note(f"{index}: {action}: grad of", {n: p.grad for n, p in self.model.named_parameters()})
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.7)
            self.note(f"{index}: {action}:", dict(self.model.named_parameters()))

    def note(self, what: str, tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            self.trace.append((f"{what} {name}", None if whole is None else whole.detach().clone()))

    def drawn(self) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """The next batch, in rows of each rank: of this rank alone if the model is sharded."""
        self.batches += 1
        draw = random.Random(1000 * self.seed + self.batches)
        rows, common = range(VOCABULARY), draw.choices(range(2), k=draw.randrange(4))
        batch = []
        for rank in range(self.ranks):
            tokens, targets = (torch.tensor(draw.choices(rows, k=ROWS)) for _ in range(2))
            chosen = draw.choices(range(2), k=draw.randrange(4)) if self.skippable else common
            if not self.sharded or rank == dist.get_rank():
                batch.append((tokens, targets, chosen))
        return batch

    def loss(self, order: Sequence[int] | None = None) -> torch.Tensor:
        """The loss of the next batch: of this rank's rows if the model is sharded, else the mean of all ranks'."""
        return torch.stack(
            [cross_entropy(self.model(x, order, chosen), target) for x, target, chosen in self.drawn()]
        ).mean()

    def trained(self) -> list[nn.Parameter]:
        return [param for param in self.model.parameters() if param.grad is not None]

    def has_gradients(self) -> bool:
        return bool(self.trained())

    # -- with gradients; an update may follow ------------------------------------------------------------------------

    def train(self) -> None:
        self.loss().backward()
        self.failed = False

    def accumulate(self) -> None:
        self.train()
        self.train()

    def accumulate_unreduced(self) -> None:
        """Or reduced in each microbatch, and shown in the last one."""
        reduced, shown = self.rng.choice(((False, False), (False, True), (True, False)))
        for last in (False, False, True):
            self._set("set_requires_gradient_sync", last or reduced)
            self._set("set_is_last_backward", last or shown)
            self.train()

    def two_forwards(self) -> None:
        (self.loss() + 2 * self.loss()).backward()

    def two_losses(self) -> None:
        losses = [self.loss(), self.loss()]
        for loss in self.rng.sample(losses, 2):
            loss.backward()

    def other_blocks(self) -> None:
        """Run the blocks in another order, some of them twice, others not at all."""
        blocks = range(len(self.model.blocks))
        self.loss(self.rng.choices(blocks, k=self.rng.randrange(1, 5))).backward()

    def one_block(self) -> bool:
        block = self.rng.choice(self.model.blocks)
        if usable := block in self.units and any(param.requires_grad for param in block.parameters()):
            rows = torch.ones(self.ranks, ROWS, block.first.in_features).cumsum(0).unbind()
            rows = rows[dist.get_rank() :][:1] if self.sharded else rows
            torch.stack([block(x, (0, 1)).square().mean() for x in rows]).mean().backward()
        return not usable

    def without_head(self) -> None:
        hidden = [self.model(x, None, chosen, head=False) for x, _, chosen in self.drawn()]
        torch.stack(hidden).square().mean().backward()

    def chunked_loss(self) -> bool:
        """The head and its loss in parts, each with a backward of its own."""
        batch = self.drawn() if self.ends_together else []
        for x, targets, chosen in batch:
            hidden = self.model(x, None, chosen, head=False)
            leaf = hidden.detach().requires_grad_()
            for part, target in zip(leaf.chunk(2), targets.chunk(2), strict=True):
                (cross_entropy(self.model.head(part), target) / 2 / len(batch)).backward()
            hidden.backward(leaf.grad)
        return not batch

    def accumulate_partial(self) -> None:
        """HSDP: replicas are summed in the last microbatch only."""
        others = self.rng.random() < 0.5
        for last in (False, False, True):
            self._set("set_requires_all_reduce", last)
            self._set("set_is_last_backward", last or others)
            self.train()

    def divide(self) -> bool:
        """Gradients are divided by twice the number of ranks."""
        if self.has_gradients():
            return True
        for factor in (2.0 * self.ranks, float(self.ranks)):
            for unit in self.units if self.sharded else ():
                unit.set_gradient_divide_factor(factor)
            if factor > self.ranks:
                self.train()
        for param in () if self.sharded else self.trained():
            param.grad.mul_(0.5)
        return False

    def twice_through(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        loss.backward()

    def edit_gradients(self) -> None:
        self.train()
        for param in self.trained():
            param.grad.mul_(0.5)
        self.train()

    def end_by_hand(self) -> None:
        by_hand = self.sharded and not self.failed  # else a backward is under way
        if by_hand:
            self.model.set_manual_backward_finalization(True)
        self.accumulate()
        if by_hand:
            self.model.finalize_backward()
            self.model.set_manual_backward_finalization(False)

    def clip(self) -> None:
        self.train()
        clip = torch.nn.utils.clip_grad_norm_
        params = self.model.parameters()
        ours = self.rng.random() < 0.5 and self.sharded
        self.note("norm", {"": self.model.clip_grad_norm_(0.1) if ours else clip(params, 0.1)})

    # -- without: each returns True ----------------------------------------------------------------------------------

    def look(self) -> bool:
        with torch.inference_mode() if self.rng.random() < 0.5 else torch.no_grad():
            self.loss()
        return True

    def fail_in_forward(self) -> bool:
        self.model.fails = self.rng.randrange(len(self.model.blocks))
        with contextlib.suppress(KeyError), torch.set_grad_enabled(self.rng.random() < 0.5):
            self.loss()
        self.model.fails = None
        return self.reset()

    def fail_in_backward(self) -> bool:
        """Raise in a backward; then clear all gradients."""
        hook = self.failing().register_full_backward_pre_hook(lambda *gradients: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            self.loss().backward()
        hook.remove()
        self.optimizer.zero_grad()
        self.failed = True
        return self.reset()

    def failing(self) -> nn.Module:
        return self.rng.choice((self.model.norm, *self.model.blocks))

    def reset(self) -> bool:
        """Say, or do not say, that a pass has failed."""
        if self.rng.random() < 0.5 and self.sharded:
            self.model.reset_iter_state()
        return True

    def gather(self) -> bool:
        unit = self.rng.choice(self.units)
        if self.sharded:
            unit.unshard(async_op=True).wait()
        return True

    def free(self) -> bool:
        for unit in self.units if self.sharded else ():
            unit.reshard()
        return True

    def edit_shards(self) -> bool:
        """Change shards in place, as loading averaged weights does."""
        self.free()
        with torch.no_grad():
            for param in self.model.parameters():
                param.clamp_(-1.5, 1.5).mul_(0.99)
        return True

    def _set(self, method: str, value: Any) -> bool:
        if self.sharded:
            getattr(self.model, method)(value)
        return True

    def keep_after_forward(self) -> bool:
        return self._set("set_reshard_after_forward", self.rng.random() < 0.5)

    def keep_after_backward(self) -> bool:
        return self._set("set_reshard_after_backward", self.rng.random() < 0.5)

    def prefetch(self) -> bool:
        return self._set("set_prefetch_depth", self.rng.randrange(4))

    def copy_late(self) -> bool:
        return self._set("set_copy_gradients_late", self.rng.random() < 0.5)

    def max_buffers(self) -> bool:
        return self._set("set_reduce_scatter_max_input_buffers", self.rng.randrange(1, 4))

    def keep_memory(self) -> bool:
        return self._set("set_keep_unsharded_storage", self.rng.random() < 0.5)

    def sum_only(self) -> bool:
        enable = self.rng.random() < 0.5
        for unit in self.units if self.sharded else ():
            unit.set_force_sum_reduction_for_comms(enable)
        return True

    def other_group(self) -> bool:
        return self._set("set_separate_reduce_scatter_group", self.rng.random() < 0.5)

    def freeze(self) -> bool:
        """Freeze or unfreeze an end, a block or a part of it."""
        block = self.rng.choice(self.model.blocks)
        part = self.rng.choice((block, block.first, block.experts[0], self.model.embed, self.model.head))
        if not self.has_gradients():
            part.requires_grad_(self.rng.random() < 0.6)
        return True

    def zero(self) -> bool:
        self.optimizer.zero_grad(set_to_none=False)
        return True

    def save_and_load(self) -> bool:
        self.note("saved", self.model.state_dict())
        self.model.load_state_dict({name: 0.9 * value for name, value in self.model.state_dict().items()})
        return True

    def move_away_and_back(self) -> bool:
        if self.sharded:
            self.model.reset_iter_state()  # a backward may have failed
            fsdp_runtime.offload(self.model, self.optimizer)
            fsdp_runtime.reload(self.model, self.optimizer)
        return True

    def edit(self) -> bool:
        """Change a whole parameter in place."""
        if not self.has_gradients():
            with torch.no_grad():
                if not self.sharded:
                    self.model.head.weight.mul_(1.5)
                else:
                    with fsdp_runtime.full_params(self.model):
                        self.model.head.weight.mul_(1.5)
        return True

    def export(self) -> bool:
        named = fsdp_runtime.iter_full_params if self.sharded else nn.Module.named_parameters
        self.note("exported", dict(sorted(named(self.model))))
        return True

    def new_optimizer(self) -> bool:
        """Replace the optimizer by a new one with its state."""
        self.free()
        states = self.optimizer.state_dict()
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.optimizer.load_state_dict(states)
        return True


def check_programs(seeds: list[int], actions: int = 14) -> None:
    """Run each program sharded and in one process, and compare the two traces.

    In float64: in float32 the rounding of some gradients, of sums that cancel, differs between processors by 1e-3.
    """
    torch.set_default_dtype(torch.float64)
    for seed in seeds:
        wanted, got = Program(seed, sharded=False), Program(seed, sharded=True)
        wanted.run(actions)
        got.run(actions)
        for (what, expected), (noted, value) in zip(wanted.trace, got.trace, strict=True):
            where = f"program {seed}, {what}"
            assert what == noted, f"{where}: {noted}"
            assert (value is None) == (expected is None), where
            if expected is not None:
                text = f"{where}: {{}}".format
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=text)
    torch.set_default_dtype(torch.float32)


class Race(Program):
    """A program whose values nobody compares: on the simulated device other ranks do not exist."""

    def note(self, what: str, tensors: dict[str, Any]) -> None:
        for tensor in tensors.values():
            if tensor is not None:
                _ = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach() * 1

    def export(self) -> bool:
        return True

    def save_and_load(self) -> bool:
        self.model.reset_iter_state()  # a backward may have failed
        return super().save_and_load()


def check_races(seed: int, actions: int = 16) -> None:
    """Run a program as one rank on the simulated device, which raises where memory is used without an order."""
    draw = random.Random(seed)
    ranks = draw.choice((2, 3, 4, 4))
    offload = draw.choice((OFFLOADS[0], *OFFLOADS))
    where = {
        "device": "cpu" if offload is OFFLOADS[0] else "cpu:0",
        "ranks": ranks,
        "rank": draw.randrange(ranks),
    }
    with device(draw.choice(("at once", "late", "at random")), **where):
        Race(seed, sharded=True, offload_policy=offload).run(actions)

"""Random training scripts: what a user does with a model between two updates, in any order, sharded or in one process.

Every rank draws the same program. In one process a rank's share of a batch is the whole batch.
"""

import contextlib
import random
from typing import Any

import torch
import torch.distributed as dist
from runtime_helpers import Net, mesh_of, seeded
from torch import nn

import block_optim
import fsdp_runtime
from fsdp_runtime import block_policies, fully_shard

VOCABULARY, ROWS = 11, 2  # rows per rank
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
    "copy_late", "other_group", "new_optimizer",
)  # fmt: skip


class Program:
    """One program with its model and optimizer; `trace` has the values to compare, with what they are.

    Args:
        seed: of all that is drawn: the model, how it is sharded, and the actions.
        sharded: whether it is; else this rank computes all by itself.
    """

    def __init__(self, seed: int, sharded: bool):
        self.rng = rng = random.Random(seed)
        self.seed, self.sharded, self.batches = seed, sharded, 0
        self.ranks = dist.get_world_size()
        self.trace: list[tuple[str, torch.Tensor | None]] = []
        options = {
            "width": rng.choice((5, 8)),
            "blocks": rng.choice((1, 2, 3)),
            "recompute": rng.random() < 0.3,
        }
        self.model: Any = seeded(Net, seed, vocab=VOCABULARY, tied=rng.random() < 0.3, **options)
        shape = (2, 2) if self.ranks == 4 and rng.random() < 0.5 else (self.ranks,)
        reshard, policy = rng.choice((True, False, None)), rng.choice(POLICIES)
        if sharded:
            for unit in (*self.model.blocks, self.model):
                fully_shard(unit, mesh=mesh_of(*shape), reshard_after_forward=reshard, block_policy=policy)
        self.make_optimizer = OPTIMIZERS[rng.choice(list(OPTIMIZERS))]
        self.optimizer = self.make_optimizer(self.model.parameters())

    def run(self, actions: int) -> None:
        for index in range(actions):
            action = self.rng.choice(ACTIONS)
            keeps = self.rng.random() < 0.15  # the gradients for what comes next
            if getattr(self, action)() or keeps:
                continue
            self.note(f"{index}: {action}: grad of", {n: p.grad for n, p in self.model.named_parameters()})
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.7)
            self.note(f"{index}: {action}:", dict(self.model.named_parameters()))

    def note(self, what: str, tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            self.trace.append((f"{what} {name}", None if whole is None else whole.detach().clone()))

    def mine(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(self.ranks)[dist.get_rank()] if self.sharded else batch

    def loss(self, order: list[int] | None = None) -> torch.Tensor:
        """The loss of the next batch, of this rank's rows if the model is sharded."""
        self.batches += 1
        draw = torch.Generator().manual_seed(1000 * self.seed + self.batches)
        tokens, targets = torch.randint(0, VOCABULARY, (2, ROWS * self.ranks), generator=draw)
        return nn.functional.cross_entropy(self.model(self.mine(tokens), order), self.mine(targets))

    def has_gradients(self) -> bool:
        return any(param.grad is not None for param in self.model.parameters())

    # -- with gradients; an update may follow ------------------------------------------------------------------------

    def train(self) -> None:
        self.loss().backward()

    def accumulate(self) -> None:
        self.train()
        self.train()

    def accumulate_unreduced(self) -> None:
        others = self.rng.random() < 0.5
        for last in (False, False, True):
            if self.sharded:
                self.model.set_requires_gradient_sync(last)
                self.model.set_is_last_backward(last or others)
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
        x = torch.ones(ROWS * self.ranks, block.weight.shape[1]).cumsum(0)
        if trained := any(param.requires_grad for param in block.parameters()):
            block(self.mine(x)).square().mean().backward()
        return not trained

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
        self.model.fails = True
        with contextlib.suppress(KeyError):
            self.loss()
        self.model.fails = False
        return True

    def fail_in_backward(self) -> bool:
        """Raise in a backward, after the head's gradients; then clear all gradients."""
        hook = self.model.head.register_full_backward_hook(lambda *gradients: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            self.loss().backward()
        hook.remove()
        self.optimizer.zero_grad()
        return True

    def gather(self) -> bool:
        unit = self.rng.choice((self.model, *self.model.blocks))
        if self.sharded:
            unit.unshard(async_op=True).wait()
        return True

    def free(self) -> bool:
        for unit in (self.model, *self.model.blocks) if self.sharded else ():
            unit.reshard()
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

    def other_group(self) -> bool:
        return self._set("set_separate_reduce_scatter_group", self.rng.random() < 0.5)

    def freeze(self) -> bool:
        """Freeze or unfreeze a block."""
        if not self.has_gradients():
            self.rng.choice(self.model.blocks).requires_grad_(self.rng.random() < 0.6)
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
    """Run each program sharded and in one process, and compare the two traces."""
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
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=2e-5, msg=text)

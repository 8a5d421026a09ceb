"""Our runtime with one of its ideas taken away, through the public seams of `fully_shard`: for the ablation.

    staged        a transport that copies through staging buffers, as a runtime without one flat buffer has to
    Gathering     an optimizer that gathers whole tensors, as a block-wise one has to where blocks are cut

The others need no code here: `set_copy_gradients_late`, and the planners of `layout_planner.baselines`.
"""

from collections.abc import Callable, Iterable
from typing import Any


class After:
    """A work with something to do once it has completed."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        """Wait, then act; not again when it is called again."""
        self._work.wait()
        then, self._then = self._then, lambda: None
        then()

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._work.is_completed()


class Staged:
    """A `dbuffer.Transport` around another: what is sent and received lies in memory of its own, and is copied."""

    def __init__(self, rank: int, inner: Any) -> None:
        self.name = f"staged {inner.name}"
        self._rank, self._inner = rank, inner

    def all_gather(self, pairs: Any, label: str) -> After:
        """Copy in, gather, copy out."""
        staging = []
        for receive, send in pairs:
            whole = receive.new_empty(receive.shape)
            own = whole.narrow(0, self._rank * send.numel(), send.numel())
            staging.append((whole, own.copy_(send)))
        work = self._inner.all_gather(staging, label)

        def copy_out() -> None:
            for (receive, _), (whole, _) in zip(pairs, staging, strict=True):
                receive.copy_(whole)

        return After(work, copy_out)

    def reduce_scatter(self, pairs: Any, op: Any, label: str) -> After:
        """Copy in, reduce."""
        staging = [(receive, send.clone()) for receive, send in pairs]
        return After(self._inner.reduce_scatter(staging, op, label), staging.clear)

    def all_to_all(self, receive: Any, send: Any, label: str) -> After:
        """Copy in, exchange, copy out."""
        sent, received = send.clone(), receive.new_empty(receive.shape)
        work = self._inner.all_to_all(received, sent, label)
        return After(work, lambda: receive.copy_(received))

    def all_reduce(self, tensors: Any, op: Any, label: str) -> Any:
        """As the other."""
        return self._inner.all_reduce(tensors, op, label)


def staged(group: Any) -> Staged:
    """For `fully_shard(transport=staged)`: what the group would have had, with staging buffers."""
    from dbuffer.transport import transport_of

    return Staged(group.rank(), transport_of(group, "auto"))


class Gathering:
    """Steps whole copies of sharded parameters, from gathered weights and gradients, and keeps this rank's slices.

    Args:
        sharded: the parameters of a module that `fully_shard` was called on.
        make: from whole parameters to the optimizers that step them.
    """

    def __init__(self, sharded: Iterable[Any], make: Callable[[Any], list[Any]]) -> None:
        from torch.nn import Parameter, ParameterList

        self.sharded = list(sharded)
        self.whole = [Parameter(p.full_tensor().detach().clone()) for p in self.sharded]
        self._optimizers = make(ParameterList(self.whole))

    @property
    def state(self) -> dict[Any, Any]:
        """Of all optimizers inside."""
        return {key: value for optimizer in self._optimizers for key, value in optimizer.state.items()}

    def step(self) -> None:
        """Communicates two gathers for each parameter: its weights and its gradient."""
        import torch

        from ragged_shard import distribute_like

        with torch.no_grad():
            for whole, sharded in zip(self.whole, self.sharded, strict=True):
                whole.copy_(sharded.full_tensor())
                whole.grad = sharded.grad.full_tensor()
            for optimizer in self._optimizers:
                optimizer.step()
            for whole, sharded in zip(self.whole, self.sharded, strict=True):
                sharded.copy_(distribute_like(whole.detach(), sharded, src_data_rank=None))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for param in (*self.whole, *self.sharded):
            param.grad = None

"""The interface of a transport."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

Op = Literal["avg", "sum"]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (receive, send)


class Work(Protocol):
    """A transfer under way. A transport that knows more gives its works other attributes.

    wait_for     like `wait`, at most so many seconds; returns whether it has completed. The host looks around meanwhile
    quiet        nothing accesses the tensors any more: only then may their memory be reused. By default False
    under_way    the error was a signal handler's, not the work's: the next `wait` continues. By default False

    The last two count after a RuntimeError of `wait`.
    """

    def wait(self) -> object:
        """Block until it has completed (on a GPU: make the current stream wait).

        May be called again where it was interrupted by an exception that is not its own.

        Raises:
            RuntimeError: it failed on this rank or another.
        """
        ...

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, without delay."""
        ...


class Transport(Protocol):
    """Moves bytes between the ranks of one process group.

    Every rank makes the same calls in the same order. A call returns at once; its tensors must stay as they are
    until `wait` has returned, or without a work, which a call that was queued on the current stream may leave out,
    until that stream has come so far. All receive all slices, or all raise: never a wrong value without an error.

    Attributes:
        name: for logs and errors.
    """

    name: str

    def all_gather(self, pairs: Pairs, label: str) -> Work | None:
        """Start giving every `send` to all ranks, in the order of ranks in `receive`; `send` may lie in it.

        Args:
            pairs: contiguous, 1-D; `receive` has as many elements as the `send`s of all ranks together.
            label: name of the exchange, for errors; the same on all ranks.
        """
        ...

    def reduce_scatter(self, pairs: Pairs, op: Op, label: str) -> Work | None:
        """Start reducing every `send` over the ranks, each rank's slice into its `receive`, which may lie in it."""
        ...

    def all_to_all(self, receive: torch.Tensor, send: torch.Tensor, label: str) -> Work | None:
        """Start giving each rank its slice of `send`; `receive` gets all ranks' slices for this one, in their order.

        Args:
            receive, send: contiguous, 1-D, of one dtype, as many equal slices as there are ranks; not the same memory.
            label: as for `all_gather`.
        """
        ...

    def all_reduce(self, tensors: list[torch.Tensor], op: Op, label: str) -> Work | None:
        """Start reducing every tensor over the ranks, in place."""
        ...

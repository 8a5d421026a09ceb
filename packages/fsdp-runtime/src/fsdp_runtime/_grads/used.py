"""Finds the parameters that some rank used in a step: they get a gradient on every rank, and the others on none.

One byte a trained parameter and reduction, 1 where this rank has used it, in one all-reduce (the maximum) for each axis
of a mesh, once a step. A rank with all gradients ignores the result: nothing waits for it. Others read it on the host.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from dbuffer import start_collective, wait_in_order

from .._torch.streams import Streams
from .buffer import GradBuffer

_TITLE = "exchange of the parameters that were used"


class UsedParameters:
    """The exchange of the ranks of one mesh. The constructor starts it on the stream of reductions.

    `finish` raises RuntimeError where it failed (a rank died, a timeout).

    Args:
        groups: this rank's process group on each axis.
        members: the gradients that were reduced since the last exchange, in the same order on every rank.
    """

    def __init__(
        self, groups: Iterable[dist.ProcessGroup], members: Iterable[GradBuffer], streams: Streams
    ) -> None:
        self._members = list(members)
        self._streams = streams
        self._groups = [group for group in groups if group.size() > 1]
        flags: list[bool] = []
        for own in self._members:
            for reduction in own.unconfirmed:
                flags += [index not in reduction.missing for index in reduction.expected]
        self._asks = not all(flags)
        self._works: list[Any] = []
        layer = streams.layer
        start_collective(self._groups, _TITLE, layer)
        with layer.on(streams.reduce):
            if self._asks or not layer.asynchronous:
                self._flags = layer.from_host(torch.tensor(flags, dtype=torch.uint8))
            else:
                self._flags = torch.ones(len(flags), dtype=torch.uint8, device=layer.device)
            for group in self._groups if layer.asynchronous else self._groups[:1]:
                self._works.append(self._start(group))
            if self._asks and layer.asynchronous:
                self._flags = layer.to_host(self._flags)
            self._event = layer.record()

    def _start(self, group: dist.ProcessGroup) -> Any:
        return dist.all_reduce(
            self._flags, dist.ReduceOp.MAX, group=group, async_op=not self._streams.layer.asynchronous
        )

    def finish(self, refusal: str) -> None:
        """Give parameters that other ranks have used their gradients, and call the users' hooks.

        `refusal`: why these may not communicate; empty if they may.
        """
        layer = self._streams.layer
        if layer.asynchronous:
            if self._asks:
                layer.wait_on_host(self._event)
        else:
            try:
                for work, group in zip(self._works, self._groups, strict=False):
                    wait_in_order(work, group)
                for group in self._groups[1:]:
                    wait_in_order(self._start(group), group)
            except RuntimeError as error:
                raise RuntimeError(f"{_TITLE} failed: {error}") from error
        flags = iter(self._flags.tolist() if self._asks else ())
        for own in self._members:
            own.publish_missing(flags, refusal)

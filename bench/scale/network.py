"""The model behind `scale`: one ZeRO-3 step as two streams. Pure arithmetic.

    wire      [gather 1][gather 2]...[gather L]   ...   [gather L-1][reduce L][gather L-2][reduce L-1]...[reduce 1]
    compute             [ f 1 ][ f 2 ]...[ f L ][   b L   ][   b L-1   ]  ...

A layer's compute waits for its gather; gathers run at most `depth` layers ahead; reductions queue behind the gathers
already launched. What the step takes beyond its compute is exposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One unit of a step; seconds.

    Attributes:
        forward, backward: compute, copies on the compute stream included.
        gather, reduce: on the wire.
    """

    forward: float
    backward: float
    gather: float
    reduce: float


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and how much of it no compute covers."""

    total: float
    compute: float

    @property
    def exposed(self) -> float:
        """Communication that nothing hides."""
        return self.total - self.compute


def step(layers: Sequence[Layer], *, depth: int = 1, overlap: bool = True) -> Step:
    """One forward and backward over the layers.

    Args:
        depth: gathers run so many layers ahead of compute.
        overlap: False: wire and compute take turns, as on a CPU without a spare core.
    """
    compute = sum(layer.forward + layer.backward for layer in layers)
    if not overlap:
        wire = sum(2 * layer.gather + layer.reduce for layer in layers[:-1])
        return Step(compute + wire + layers[-1].gather + layers[-1].reduce, compute)
    now, wire = 0.0, 0.0
    starts: list[float] = []
    ready: list[float] = []
    for index, layer in enumerate(layers):
        while len(ready) <= min(index + depth, len(layers) - 1):
            ahead = len(ready)
            may = starts[ahead - depth - 1] if ahead > depth else 0.0
            wire = max(wire, may) + layers[ahead].gather
            ready.append(wire)
        now = max(now, ready[index])
        starts.append(now)
        now += layer.forward
    held = len(layers) - 1  # the last layer is still gathered
    gathered = {held: now}
    for index in range(len(layers) - 1, -1, -1):
        for ahead in range(index, max(index - depth, 0) - 1, -1):
            if ahead not in gathered:
                wire = max(wire, now) + layers[ahead].gather
                gathered[ahead] = wire
        now = max(now, gathered[index]) + layers[index].backward
        wire = max(wire, now) + layers[index].reduce
    return Step(max(now, wire), compute)

"""How much two other systems pad the same group: for comparison only, written from their definitions.

Both cut a tensor between slices of dimension 0. A unit is the least number of slices that ends on a cut
point of the block grid, so at `Rows(1)` a unit is one slice and the rules are what those systems do.

    even rows (FSDP2)       per tensor:  |-- chunk --|-- chunk --|- chunk/// |   chunk = ceil(units / W) units
    lcm (Megatron-FSDP)     per group:   S is a multiple of the lcm of all units, times W >= all elements
"""

import math
from collections.abc import Sequence

from layout_planner._spec import TensorSpec


def even_rows(specs: Sequence[TensorSpec], world_size: int) -> int:
    """Elements of the padded group under even row chunks.

    FSDP2's `Shard(0)`: every tensor is cut on its own into `world_size` chunks of the same number of units
    along dimension 0, and padded to that.

    Raises:
        ValueError: a world size below 1.
    """
    _check(world_size)
    padded = 0
    for spec in specs:
        unit = _unit(spec)
        chunk = -(-spec.numel // (unit * world_size)) * unit
        padded += world_size * chunk
    return padded


def lcm_rule(specs: Sequence[TensorSpec], world_size: int) -> int:
    """Elements of the padded group under the lcm rule.

    Megatron-FSDP: tensors lie behind one another in one buffer whose shard size is a multiple of the least
    common multiple of all units, so that every shard boundary is a cut point of whatever tensor it meets.

    Raises:
        ValueError: a world size below 1.
    """
    _check(world_size)
    chunk = math.lcm(*(_unit(spec) for spec in specs))
    total = sum(spec.numel for spec in specs)
    return world_size * -(-total // (world_size * chunk)) * chunk


def _unit(spec: TensorSpec) -> int:
    """Elements of the least number of dimension-0 slices after which, each time, the grid has a cut point."""
    slice_numel = spec.numel // spec.shape[0] if spec.shape else 1
    grid = spec.grid
    return min(math.lcm(grid.block if grid.uniform else grid.period, slice_numel), spec.numel)


def _check(world_size: int) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; it is an integer from 1 up")

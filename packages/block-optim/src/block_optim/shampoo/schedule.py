"""When a block's turn comes: from its number, the step and the options; the same at every world size.

frequency 4, start 8, staggered; the block's phase is its number modulo 4

step        1  2  3  4  5  6  7  8  9 10 11 12 13
phase 0                       (8)           x
phase 1              x           x              x        a quarter of the blocks in each step
phase 2                 x           x
phase 3                    x           x
                              ^ start: every block has a root by now

not staggered: all blocks at 8, 12, 16 ...
"""


def first_due(number: int, start: int, frequency: int, stagger: bool) -> int:
    """The first step at which a block's roots are computed.

    Within the `frequency` steps up to `start`, in its phase; at `start` if that would be before step 1.
    """
    if not stagger:
        return start
    step = start - (start - number) % frequency
    return step if step >= 1 else start


def is_due(step: int, number: int, start: int, frequency: int, stagger: bool) -> bool:
    """Whether a block's roots are computed in this step (counted from 1)."""
    first = first_due(number, start, frequency, stagger)
    if step <= first:
        return step == first
    return (step - (number if stagger else start)) % frequency == 0

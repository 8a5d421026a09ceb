"""What happens when a loss or a gradient is NaN or infinite: counted, named, and the run stops or skips the update."""

import math
from dataclasses import dataclass

from .errors import TrainError

_MOST = 5  # this many such steps in a row end a run that skips: it has diverged


@dataclass
class BadNumbers:
    """The count of one run; the same on every rank. `mode` is ``--on-nan``."""

    mode: str
    total: int = 0
    in_a_row: int = 0

    def take(self, step: int, loss: float, norm: float, ranks: int, rank: int) -> str | None:
        """Look at a step's figures; what to say of them, None if they are finite.

        Args:
            step: counted from 1.
            loss, norm: over all ranks.
            ranks: how many had such a loss themselves.
            rank: which, if it was one.

        Raises:
            TrainError: the run should end.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return None
        self.total += 1
        self.in_a_row += 1
        who = f"rank {rank}" if ranks == 1 else f"{ranks} ranks"
        what = (
            f"the loss of {who} is {loss}"
            if ranks
            else f"the gradients' norm is {norm} (the loss {loss:.4g})"
        )
        cure = "try a lower --lr, a longer --warmup or --clip"
        if self.mode == "stop":
            raise TrainError(f"step {step}: {what}; {cure}, or --on-nan skip")
        if self.in_a_row >= _MOST:
            raise TrainError(f"step {step}: {what}, and no update could be made for {_MOST} steps; {cure}")
        return f"step {step}: {what}; update skipped, {self.total} so far"

"""Memory that collectives use in addition to a buffer's: for what is encoded, and for what arrives."""

import torch

from .recycler import Recycler


class Scratch:
    """A run of bytes from the recycler that comes and goes; tensors on it stay the same.

    Attributes:
        flat: all of it, uint8, 1-D. Without memory while not `present`.
        present: whether there is memory.
    """

    def __init__(self, recycler: Recycler, nbytes: int) -> None:
        self._recycler, self._nbytes = recycler, nbytes
        self._storage = torch.UntypedStorage(0, device=recycler.device)
        self.present = False
        self.materialize()
        self.flat = torch.empty(0, dtype=torch.uint8, device=recycler.device)
        self.flat.set_(self._storage, 0, (nbytes,), (1,))
        self.release()

    def materialize(self) -> None:
        """Have memory, uninitialised, for use on the current stream."""
        if not self.present:
            self._recycler.lend(self._storage, self._nbytes)
            self.present = True

    def release(self) -> None:
        """Have none. On CUDA call it on the stream of the last use."""
        if self.present:
            self.present = False
            self._recycler.take_back(self._storage)

    def condemn(self) -> None:
        """Have none, and never use it again: a collective that failed may still write there."""
        if self.present:
            self.present = False
            self._recycler.quarantine(self._storage)

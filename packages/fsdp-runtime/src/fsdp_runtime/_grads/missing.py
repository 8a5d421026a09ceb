"""Finds the parameters that no rank used in a step. No collective: the ranks exchange it in the process group's store.

each trained parameter has a gradient on this rank     nothing is sent or read
some are missing        add them to an entry of the store --reduction--> read the entry: the ones that all ranks miss

The reduction completes here after every rank has started it, and each rank has written before it starts. So a parameter
is unused if every rank of the mesh has written, and every rank misses it. A rank without an entry used every parameter.
"""

import contextlib
import weakref
from collections.abc import Collection, Mapping
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dbuffer import PatientStore

from .._plan.mesh import DataMesh

_PATIENCE = 60.0  # seconds that a request of the store may take
WAY_OUT = "use every parameter on every rank, or set_reduce_scatter_unused_params(True)"


class Ledger:
    """Entries of the ranks of one mesh about their reductions. Every rank counts the same ones.

    Args:
        world: process group of all ranks, whose store is used.
        name: the mesh's, the same on its ranks.

    Attributes:
        count: number of groups of parameters on this mesh that were handed to a reduction.
    """

    def __init__(self, world: dist.ProcessGroup, name: str) -> None:
        self._name = name
        self.count = 0
        self._rank = world.rank()
        self._world = weakref.ref(world)
        self._store: PatientStore | None = None
        self._appends = False  # whether the store can append to a key

    def connect(self) -> PatientStore:
        """The store.

        Raises:
            RuntimeError: the process group has none.
        """
        if self._store is None:
            world = self._world()
            shared = None if world is None else world.get_group_store()
            if shared is None:
                raise RuntimeError("the process group has no store")
            store = PrefixStore(f"unused parameters/{self._name}", shared)
            self._store = PatientStore(store, _PATIENCE)
            self._appends = shared.has_extended_api()  # type: ignore[attr-defined]
        return self._store

    def write(self, key: str, numbers: Collection[int]) -> None:
        """Publish the parameters that this rank misses in the reduction of this key. One request."""
        store = self.connect()
        # One key for all ranks, so that one request reads it, however many they are.
        entry, known = f"{self._rank}:{sum(1 << each for each in numbers):x} ", ""
        if self._appends:
            store.append(key, entry)
            return
        while (current := store.compare_set(key, known, known + entry).decode()) != known + entry:
            known = current

    def read(self, key: str, size: int) -> int:
        """The parameters that all of `size` ranks miss, as bits. Two requests; the last reader's two more delete it."""
        store = self.connect()
        entries = store.get(key).decode().split()
        if store.add(f"{key} read", 1) == len(entries):
            store.delete_key(key)
            store.delete_key(f"{key} read")
        if len(entries) < size:
            return 0
        bits = -1
        for entry in entries:
            bits &= int(entry.split(":")[1], 16)
        return bits


_ledgers: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Ledger]]" = weakref.WeakKeyDictionary()


def ledger_of(data: DataMesh) -> Ledger:
    """The ledger that all meshes of these ranks share. Does not communicate."""
    world = dist.group.WORLD
    assert world is not None
    known = _ledgers.setdefault(world, {})
    if data.fingerprint not in known:
        known[data.fingerprint] = Ledger(world, data.fingerprint)
    return known[data.fingerprint]


class Missing:
    """The trained parameters of a group that have no gradient on this rank in one reduction.

    Args:
        data: the group's mesh.
        ledger: the mesh's.
        key: of the reduction, the same on every rank: the group's name, and the ledger's count when it was closed.
        names: names for errors, by the parameters' numbers in the group. At least one.

    Attributes:
        asks: whether `unused` depends on other ranks.
    """

    def __init__(self, data: DataMesh, ledger: Ledger, key: str, names: Mapping[int, str]) -> None:
        self.asks = data.mesh.size() > 1
        self._data, self._ledger, self._key, self._names = data, ledger, key, names

    def publish(self) -> None:
        """Write them, before the reduction starts. One request of the store.

        Raises:
            RuntimeError: the store does not answer.
        """
        if not self._data.single_process:
            try:
                self._ledger.write(self._key, self._names)
            except RuntimeError as error:
                self._fail(error)

    def unused(self) -> Collection[int]:
        """Numbers of the parameters that no rank used, after the reduction has completed. Two requests, or four.

        Ranks that do not exist (torch's fake process group) use the same parameters as this one.

        Raises:
            RuntimeError: the store does not answer.
        """
        if self._data.single_process:
            return self._names.keys()
        try:
            bits = self._ledger.read(self._key, self._data.mesh.size())
        except RuntimeError as error:
            self._fail(error)
        return [number for number in self._names if bits >> number & 1]

    def withdraw(self) -> None:
        """Add an entry that misses nothing: the pass has failed before `unused`.

        Counts may differ between ranks afterwards. One that comes to this key in a later pass must not take the entry
        of the failed one for that pass's.
        """
        if not self._data.single_process:
            with contextlib.suppress(RuntimeError):  # a store that has gone is reported by the next `publish`
                self._ledger.write(self._key, ())

    def _fail(self, error: RuntimeError) -> NoReturn:
        raise RuntimeError(
            f"{', '.join(self._names.values())} got no gradient on this rank, and whether other ranks have one cannot "
            f"be found out: {error}. Restart from the last checkpoint; to need no store, {WAY_OUT}"
        ) from error

"""Start ranks in tests, count their bytes, and simulate ranks that do not exist. Needs only torch.

    from ragged_shard.testing import on_ranks, run_ranks

    @on_ranks(3)
    def test_all_reduce_sums():        # every rank runs the body
        x = torch.ones(1) * dist.get_rank()
        dist.all_reduce(x)
        assert x.item() == 3.0

    def test_ranks_are_numbered():     # run_ranks calls a top-level function on every rank and returns the results
        assert run_ranks(3, dist.get_rank) == [0, 1, 2]

    with simulated_ranks(1024):        # SIMULATION: this process is one of 1024 ranks, the others do not exist
        mesh = init_device_mesh("cpu", (1024,))

    with SimulatedDevice(), simulated_ranks(4):    # SIMULATION: the CPU is a device with streams; a race raises
        mesh = init_device_mesh("cpu", (4,))

How `run_ranks` works (`_pool`, `_fork_server`, `_worker`, `_pickling`): the first call of a process starts one
helper, which imports torch once and forks ranks from it in milliseconds; the ranks of a world size stay alive, with
their process group, for the next call.
"""

from ragged_shard.testing._counting import Collective, Record, record_collectives
from ragged_shard.testing._device import RaceError, SimulatedDevice
from ragged_shard.testing._one_backend import accelerator_groups
from ragged_shard.testing._pool import RankError, on_ranks, preload, run_ranks, shut_down
from ragged_shard.testing._simulated import Network, Simulation, simulated_ranks
from ragged_shard.testing._worker import rank_mesh

__all__ = [
    "Collective",
    "Network",
    "RaceError",
    "RankError",
    "Record",
    "SimulatedDevice",
    "Simulation",
    "accelerator_groups",
    "on_ranks",
    "preload",
    "rank_mesh",
    "record_collectives",
    "run_ranks",
    "shut_down",
    "simulated_ranks",
]

"""Each script of the deadlock suite ends as it says with ours; `deadlocks.py` runs them with FSDP2 too."""

from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import deadlock_scripts
import deadlocks
import pytest
import torch.distributed as dist
from deadlock_scripts import SCRIPTS
from deadlocks import Fate, judged, table, train
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import _order, _patient_calls
from ragged_shard.testing import run_ranks

TIMEOUT = 4.0


def run(script):
    """On a process group of its own: a failed pass changes what its ranks compare."""
    hangs = SCRIPTS[script].expected == "hangs"
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT if hangs else 120.0))
    patches = ((_patient_calls, "_DOUBT", 0.5), (_order, "_ASKING", 0.5), (deadlock_scripts, "PAUSE", 1.5))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        return train(script, "ours", DeviceMesh.from_group(group, "cpu"))


ENDING = [name for name, kind in SCRIPTS.items() if kind.expected != "hangs"]
# What ranks may do differently without harm is tested feature by feature elsewhere.
USUAL = {"random_depth", *(name for name in ENDING if SCRIPTS[name].expected == "raises")}


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.long] * (name not in USUAL)) for name in ENDING]
)
def test_a_script_is_right_or_every_rank_raises(script, ranks):
    fate = judged(run_ranks(ranks, run, script))
    with mock.patch.object(deadlocks, "TIMEOUT", 120.0):
        assert fate.verdict == SCRIPTS[script].expected, str(fate)


@pytest.mark.long
@pytest.mark.parametrize("script", [name for name, kind in SCRIPTS.items() if kind.expected == "hangs"])
def test_a_script_that_cannot_be_told_from_a_slow_rank_raises_at_the_timeout(script):
    fate = judged(run_ranks(3, run, script))
    with mock.patch.object(deadlocks, "TIMEOUT", TIMEOUT):
        assert fate.verdict == "hangs", str(fate)


def test_a_fate_says_who_raised_and_what_is_wrong_though_nobody_did():
    fates = {
        "raises": Fate(("A: b", "A: b"), 5.0),
        "hangs": Fate(("A: b", None), 15.0),
        "breaks": Fate(("A: b", None), 1.0, died=("SIGABRT",)),
        "wrong": Fate((None, None), 0.0, wrong=("w", "v")),
        "right": Fate((None, None), 0.0),
    }
    assert [fate.verdict for fate in fates.values()] == list(fates)
    assert str(fates["raises"]) == "2 of 2 raise, 5 s: `A: b`"
    assert str(fates["breaks"]) == "1 of 2 raise, 1 s, 1 SIGABRT: `A: b`"
    assert str(fates["wrong"]) == "**silently wrong**: 2 weights: w"
    rows = table({("tied", "ours", 2): fates["right"], ("tied", "ours", 3): fates["hangs"]}, ["ours"], [2, 3])
    assert rows.splitlines()[2].endswith("| 2 ranks: right; 3 ranks: **hangs** |")

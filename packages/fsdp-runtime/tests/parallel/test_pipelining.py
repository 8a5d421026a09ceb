"""Schedules of torch.distributed.pipelining over sharded stages: right gradients, and FSDP2's number of collectives."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from cases_pp import LOOPED, V_SHAPED, batch, built_stages, mean_square, run, stages
from harness import counts
from torch import nn
from torch.distributed import pipelining

import fsdp_runtime
from ragged_shard._torch_compat import TORCH_VERSION
from ragged_shard.testing import on_ranks, rank_mesh

SINGLE, MICROBATCHES = ("ScheduleGPipe", "Schedule1F1B"), 4
# These compute weight gradients by themselves; where parameters were freed after forward FSDP2 loses them silently.
SPLITTING = ("ScheduleInterleavedZeroBubble", *V_SHAPED)
USUAL = ("ScheduleInterleavedZeroBubble",)  # several stages a rank, and splitting; the others are long
NO_V = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason="torch 2.11 fails in its V-shaped schedules over gloo, with FSDP2 too"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.long] * (n not in USUAL) + [NO_V] * (n in V_SHAPED))
        for n in (*SINGLE, *LOOPED, *V_SHAPED)
    ],
)
@on_ranks(4, timeout=120)
def test_a_schedule_has_the_gradients_of_one_process_and_fsdp2s_collectives(name):
    # Two layers in each stage. Gathered again in each microbatch's forward and once more for the last backward.
    each = 1 if name in SINGLE else 2
    for reshard in (False, True):
        ours, theirs = (run(fsdp, name, reshard=reshard) for fsdp in (fsdp_runtime, torch_fsdp))
        assert max(ours.loss, ours.gradients) < 1e-5
        assert ours.counts == counts((10 if reshard else 2) * each, 2 * each)
        assert theirs.counts is not None
        assert ours.counts["all_gather"] == theirs.counts["all_gather"]
        if not (reshard and name in SPLITTING):  # the gradients that FSDP2 has lost it does not reduce
            assert theirs.gradients < 1e-5
            assert ours.counts == theirs.counts


@pytest.mark.parametrize("name", SINGLE)
@on_ranks(4)
def test_a_schedule_evaluates(name):
    """Outputs and the losses of the last stage without a backward; and that nothing stays gathered."""
    mesh = rank_mesh(2, 2, names=("pp", "dp"))
    _, mine, (stage,) = built_stages(fsdp_runtime, name, mesh, reshard=True)
    schedule = getattr(pipelining, name)(stage, MICROBATCHES, loss_fn=mean_square)
    x, target = (part.chunk(2)[mesh.get_local_rank("dp")] for part in batch(0))
    last = mine == [1]
    found = schedule.eval(*(() if last else (x,)), **({"target": target} if last else {}))
    if last:
        torch.testing.assert_close(found, nn.Sequential(*stages(2))(x), rtol=1e-5, atol=1e-6)

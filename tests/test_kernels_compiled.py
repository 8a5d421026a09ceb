"""The Triton kernels of block-optim and dbuffer, compiled for three GPUs on a machine without one.

Each compilation takes seconds, so these are representatives; `python -m bench kernels` prints all of them.
"""

import importlib.util

import pytest
import torch
from bench import kernels
from bench.kernels import ARCHITECTURES, CASES, wire_cases

from ragged_shard.device import has_triton

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
NAMED = {case.name: case for case in CASES}
WIRE = [case for case in wire_cases() if case.name.split()[1] in ("int8", "nf4")]
# Most instructions on the usual path, and in all, that an element may take.
MOST = {
    "elements:256 bf16": (82, 90),
    "tile:128x128 bf16": (105, 130),
    "tile:128x128 fp32": (105, 130),
    "elements:256 fp32": (80, 85),
    "elements:256 bf16 stochastic": (92, 95),
    "tile:32x32 bf16": (83, 87),
}
EVERYWHERE = list(MOST)[:3]  # one of each way to hold a tile
CHOSEN = [(name, arch) for arch in ARCHITECTURES for name in (MOST if arch == 90 else EVERYWHERE)]
MOST_REGISTERS = {"tile:128x128 fp32": 168}
# Of an H200's bandwidth, estimated: 0.77 is 1.3 times the memory's time, 0.9 is 1.1 times.
LEAST_SHARE = {
    "elements:256 fp32": 0.9,
    "elements:256 bf16": 0.9,
    "elements:256 bf16 stochastic": 0.77,
    "tile:32x32 bf16": 0.85,
    "tile:128x128 fp32": 0.9,
    "tile:128x128 bf16": 0.7,  # two passes: one alone would leave a multiprocessor a single program
}


@pytest.mark.parametrize(("name", "arch"), CHOSEN)
def test_a_kernel_spills_nothing_rounds_every_operation_and_has_whole_vectors(name, arch):
    case = NAMED[name]
    facts, variant = kernels.facts_of(case, arch), case.variant
    assert (facts.local, facts.stack) == (0, 0)
    assert facts.registers <= MOST_REGISTERS.get(name, 128)
    assert (facts.fused, facts.flushed) == (0, 0)
    twice = variant.constants.get("PASSES") == 2
    held = kernels.elements_per_thread(case) / (
        variant.pieces if twice else 1
    )  # elements that the code is written out for
    read, written = case.data_bytes
    if twice:
        read += {"fp32": 4, "bf16": 2}[case.dtypes[1]]
    assert facts.accesses[16] * 16 == held * (read + written)
    assert facts.stored[16] * 16 == held * written
    assert facts.stored[8] * 8 == held * 2
    assert set(facts.stored) == {16, 8, 4}
    assert facts.stored[4] <= 2  # the scales
    usual, static = MOST[name]
    assert facts.usual.total() / kernels.elements_per_thread(case) <= usual
    assert facts.static / held <= static


@pytest.mark.parametrize("arch", [80, 100])  # dbuffer's tests compile all of its kernels for sm_90
@pytest.mark.parametrize("case", WIRE, ids=lambda case: case.name)
def test_a_kernel_of_a_wire_format_spills_nothing_and_has_vectors(case, arch):
    facts = kernels.facts_of(case, arch)
    assert (facts.local, facts.stack) == (0, 0)
    assert facts.accesses[16] > 0


@pytest.mark.parametrize("name", LEAST_SHARE)
def test_a_multiprocessor_runs_four_programs_or_more_at_once(name):
    case = NAMED[name]
    assert kernels.programs(kernels.facts_of(case, 90).registers, case.variant.num_warps) >= 4


@pytest.mark.parametrize("name", LEAST_SHARE)
def test_a_step_could_take_its_share_of_an_h200s_bandwidth_by_counts(name):
    case = NAMED[name]
    assert (
        kernels.share(case, kernels.facts_of(case, 90), kernels.elements_per_thread(case))
        >= LEAST_SHARE[name]
    )


def test_a_loop_of_sm_80_counts_as_often_as_it_runs():
    case = NAMED["tile:128x128 fp32"]
    old, new = (kernels.facts_of(case, arch).usual.total() for arch in (80, 90))
    assert old == pytest.approx(new, rel=0.05)


def test_addresses_that_are_not_aligned_get_narrow_accesses_and_spill_nothing():
    facts = kernels.facts_of(NAMED["elements:256 bf16, not aligned"], 90)
    assert (facts.local, facts.stack) == (0, 0)
    assert 16 not in facts.accesses
    assert set(facts.stored) == {4, 2, 1}  # scales, parameters, codes


def test_kernels_are_not_for_rocm_whose_devices_have_the_same_name(monkeypatch):
    for hip, runs in ((None, True), ("6.4", False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert has_triton(torch.device("cuda")) == runs

"""Each case of the table of trainers: what we find is what FSDP2 finds in the same trainer."""

import importlib

import pytest
from table import CASES, TRAINERS, distances


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TRAINERS)
def test_in_a_trainer_a_case_is_fsdp2s(name, case):
    importlib.import_module(name)  # which skips where its trainer is not installed
    assert distances(name)[case] <= 1e-5

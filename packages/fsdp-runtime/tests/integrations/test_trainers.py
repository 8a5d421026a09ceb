"""Each case of the table of trainers: what we find is what FSDP2 finds in the same trainer."""

import importlib

import pytest
from table import CASES, TRAINERS, distances


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("case", CASES)
def test_in_a_trainer_a_case_is_fsdp2s(case, name):
    needed = name.removeprefix("cases_")
    pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")
    package = {"fabric": "lightning_fabric"}.get(needed, needed)
    pytest.importorskip(package, reason=f"{package} is not installed")
    cases = importlib.import_module(name)
    assert cases.PACKAGE == package
    assert distances(name)[case] <= 1e-5

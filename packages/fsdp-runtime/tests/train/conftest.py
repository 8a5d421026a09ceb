"""Puts this folder on the path, for test modules and the ranks that they start; a folder with text to train on."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from train_helpers import text_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs")
    text_folder(made)
    return made

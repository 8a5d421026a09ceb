"""Requests of a store that end although the store does not answer."""

import threading

import pytest
from torch.distributed import HashStore

from dbuffer._patient_calls import PatientStore


class Silent:
    """A store that answers no `check` before it is told to."""

    def __init__(self):
        self.answers = threading.Event()

    def check(self, keys):
        self.answers.wait()
        return True

    def set(self, key, value):
        raise ValueError(f"{key} is not for {value}")


def test_a_request_without_an_answer_raises_with_its_name():
    silent = Silent()
    with pytest.raises(RuntimeError, match=r"the store has not answered for 0\.05 s \(request 'check'\)"):
        PatientStore(silent, 0.05).check(["key"])  # type: ignore[arg-type]
    silent.answers.set()


def test_errors_and_values_of_the_store_are_those_of_the_request():
    with pytest.raises(ValueError, match="a is not for b"):
        PatientStore(Silent(), 60).set("a", "b")  # type: ignore[arg-type]
    store = PatientStore(HashStore(), 60)
    store.set("key", "value")
    assert (store.get("key"), store.check(["key"]), store.add("count", 2)) == (b"value", True, 2)

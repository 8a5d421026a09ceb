"""What is launched where there is a device, with kernels that only note their arguments; what is read for a check."""

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from block_optim import SOAP, AdamW, AdamW8bit, Muon, Shampoo
from block_optim.adam.launch import ALIGNMENT, Launch, Row, Scalars, launches_of
from block_optim.adam.scalars import Hyper
from block_optim.adam.variants import VECTOR, Variant
from block_optim.core.finite import largest_is_not_finite
from block_optim.core.runs import Run


class Kernel:
    """Stands for a kernel: notes the grid and the arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.calls.append((grid, arguments, constants))


def row_of(numel, *, shift=0, columns=None):
    """A run of fp32 numbers, ``shift`` elements after a multiple of 16 bytes."""
    param, *states = (torch.zeros(numel + shift)[shift:] for _ in range(3))
    columns = columns or numel
    return Row(param, tuple(states), Run((0,), numel, ()), 0, 1, columns, columns, numel, 0, torch.float32)


def variants(kernel, per_program=32):
    """Variants that differ in what they say of vectors."""

    def found(aligned, single):
        return Variant(kernel, {"VECTOR": VECTOR if aligned else 1}, 4, per_program, per_program)

    return found


def scalars():
    found = Scalars(torch.device("cpu"), 1)
    found.update([Hyper(0.1, False, 0.9, 0.99, 1e-8, 0.0, False)], [torch.tensor(1.0)])
    return found


@pytest.mark.parametrize(
    ("row", "aligned"),
    [(row_of(64), True), (row_of(64, shift=1), False), (row_of(60), False), (row_of(64, shift=4), True)],
)
def test_rows_at_multiples_of_16_bytes_and_of_8_elements_are_read_in_vectors(row, aligned):
    kernel = Kernel()
    (launch,) = launches_of([row], None, variants(kernel))
    launch([torch.zeros(row.columns)], scalars(), None)
    ((grid, _, constants),) = kernel.calls
    assert constants["VECTOR"] == (VECTOR if aligned else 1)
    assert constants["num_warps"] == 4
    assert grid == (2,)


def test_rows_of_both_kinds_are_launched_apart_and_each_program_knows_its_row():
    kernel = Kernel()
    rows = [row_of(64), row_of(63), row_of(128)]
    vectors, singles = launches_of(rows, None, variants(kernel))
    assert (list(vectors.rows), list(singles.rows)) == ([rows[0], rows[2]], [rows[1]])
    vectors([torch.zeros(128)], scalars(), None)
    _, (table, _, _, row_of_program, _), _ = kernel.calls[0]
    assert row_of_program.tolist() == [0, 0, 1, 1, 1, 1]
    assert table[:, 8].tolist() == [0, 2]  # the first program
    assert table[:, 13].tolist() == [64, 128]


def test_gradients_that_move_to_odd_addresses_are_read_one_by_one_and_back():
    kernel, memory = Kernel(), torch.zeros(65)
    (launch,) = launches_of([row_of(64)], None, variants(kernel))
    for start, vector in ((0, VECTOR), (1, 1), (0, VECTOR)):
        grad = memory[start : start + 64]
        assert (grad.data_ptr() % ALIGNMENT == 0) == (vector > 1)
        launch([grad], scalars(), None)
        _, (table, *_), constants = kernel.calls[-1]
        assert constants["VECTOR"] == vector
        assert int(table[0, 1]) == grad.data_ptr()


def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch):
    kernel, entered = Kernel(), []

    @contextlib.contextmanager
    def device_index(index):
        entered.append(index)
        yield
        entered.append("left")

    kernel.calls = entered
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    launch = Launch([row_of(64)], None, variants(kernel)(True, True), variants(kernel)(False, True))
    grads = [torch.zeros(64)]
    launch(grads, scalars(), None)
    launch._device = torch.device("cuda", 3)  # all it copies there has been copied
    launch(grads, scalars(), None)
    assert [e if isinstance(e, (int, str)) else "launch" for e in entered[3:]] == [3, "launch", "left"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
def test_the_devices_check_finds_what_is_not_finite_and_writes_nothing(bad):
    grads = [torch.full((4, 5), 3e38), torch.zeros(0), torch.ones(7, dtype=torch.bfloat16)]
    grads[2][3] = 1.0 if bad is None else bad
    versions = [g._version for g in grads]
    assert bool(largest_is_not_finite(grads, torch.device("cpu"))) == (bad is not None)
    assert [g._version for g in grads] == versions
    assert not largest_is_not_finite([torch.zeros(0)], torch.device("cpu"))


class ForeachDtypes(TorchDispatchMode):
    """Notes foreach ops whose lists have tensors of several dtypes, which CUDA does one by one; copies it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "_foreach_" in name:
            self.seen += 1
            lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
            if "_foreach_copy" not in name and len({t.dtype for ts in lists for t in ts}) > 1:
                self.mixed.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "make",
    [
        lambda named: AdamW(named),
        lambda named: Muon(named[:2], ns_steps=1),
        lambda named: Shampoo(named, grafting="adam"),
        lambda named: SOAP(named),
        lambda named: AdamW8bit(named, min_8bit_numel=1),
    ],
    ids=["AdamW", "Muon", "Shampoo", "SOAP", "AdamW8bit"],
)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)], ids=str
)
def test_foreach_ops_get_tensors_of_one_dtype(make, dtypes):
    shapes = [(16, 8), (8, 16), (8,)]
    named = [(f"p{i}", torch.nn.Parameter(torch.randn(s).to(dtypes[i % 2]))) for i, s in enumerate(shapes)]
    optimizer = make(named)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with ForeachDtypes() as mode:
        for _ in range(2):
            for _, p in named:
                p.grad = torch.randn_like(p)
            optimizer.step()
    assert mode.mixed == []
    assert mode.seen

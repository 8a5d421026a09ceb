"""The recorder of waits finds what makes the host wait for a device, and nothing else."""

import pytest
import torch

from ragged_shard.testing import OnItsWay, host_waits

WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0] > 0),
    "float": lambda x: float(x.max()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: (x + 1).cpu(),
    "equal": lambda x: torch.equal(x, x + 1),
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "mask assigned": lambda x: (x * 1).__setitem__(x > 0, x.new_zeros(())),
    "eigh": lambda x: torch.linalg.eigh(x.outer(x)),
    "pageable copy": lambda x: x.copy_(torch.tensor([1.0, 2.0, 3.0])),
    "after a foreach op": lambda x: torch._foreach_add([x], 1.0)[0].tolist(),
    "after a view": lambda x: x.view(3, 1)[1].item(),
    "after out=": lambda x: torch.mul(x, 2, out=torch.empty(3)).tolist(),
}


@pytest.mark.parametrize("case", WAITS)
def test_a_wait_is_found_where_it_is_called_or_refused(case):
    x = torch.tensor([1.0, -2.0, 3.0])
    with host_waits([x]) as waits:
        WAITS[case](x)
    assert waits.found
    assert all(line.endswith(")") and "test_host_waits.py" in line for line in waits.found)
    with pytest.raises(AssertionError, match="the host waits for the device"), host_waits([x], refuse=True):
        WAITS[case](x)


def test_what_stays_on_the_device_or_on_the_host_is_no_wait():
    x, count = torch.tensor([1.0, -2.0, 3.0], requires_grad=True), torch.zeros(())
    with host_waits([x]) as waits:
        torch.where(x > 0, x, 0).square().sum().backward()
        x.detach().clamp_(min=0).add_(torch.ones(3))
        count += 1
        assert count.item() == 1
        flag = OnItsWay(x.isfinite().all())
        assert flag.has_arrived()
        assert flag.read().item()
    assert waits.found == []

"""Shampoo and SOAP on a CUDA device."""

import pytest
import torch
from shampoo_helpers import gradients, parameter, train
from test_roots import distance, factors, reference, roots

from block_optim import SOAP, Shampoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = (200, 96)


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_a_run_on_the_device_follows_the_run_on_the_cpu(kind):
    grads = gradients(SHAPE, 12)
    options = {"lr": 0.01, "max_preconditioner_dim": 64, "precondition_frequency": 4}
    cpu, device = parameter(SHAPE), torch.nn.Parameter(parameter(SHAPE).detach().cuda())
    train([cpu], [grads], kind([cpu], **options))
    train([device], [[g.cuda() for g in grads]], kind([device], **options))
    moved = (cpu.detach() - parameter(SHAPE).detach()).norm()
    assert float((device.detach().cpu() - cpu.detach()).norm() / moved) < 0.02


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_the_bits_do_not_depend_on_how_many_blocks_a_process_has(kind):
    options = {"lr": 0.01, "max_preconditioner_dim": 32, "precondition_frequency": 3}
    many = [torch.nn.Parameter(parameter((96, 64), seed).detach().cuda()) for seed in range(5)]
    grads = [[g.cuda() for g in gradients((96, 64), 8, seed)] for seed in range(5)]
    one = torch.nn.Parameter(many[3].detach().clone())
    train(many, grads, kind(many, **options))
    train([one], [grads[3]], kind([one], **options))
    assert torch.equal(one.detach(), many[3].detach())


def test_roots_are_close_to_fp64():
    batch = factors(3, 128, 160).cuda()
    for matrix, root in zip(batch, roots(batch).roots, strict=True):
        assert distance(root, reference(matrix, 1e-5)) < 1e-3

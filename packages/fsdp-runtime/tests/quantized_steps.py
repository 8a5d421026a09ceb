"""Steps of SGD whose weights, gradients or both travel as codes: on ranks, and in one process that does the same.

The process has full parameters, computes with a model whose weights are what codes of whole tensors say, and takes the
mean over ranks of gradients as they travel: rounded to bf16, added in fp32 in the order of ranks. So bits are equal.
"""

from typing import Any

import torch
import torch.distributed as dist
from runtime_helpers import loss_of, tokens

import dbuffer


def quantized(fmt, values):
    """Codes, scales and their run of rows, of a whole matrix."""
    grid = fmt.grid(tuple(values.shape))
    codes = torch.zeros(grid.rows * fmt.code_bytes(grid.columns), dtype=torch.uint8)
    scales, run = torch.zeros(grid.num_scales), dbuffer.encodings.RowRun(grid, 0, grid.rows)
    fmt.quantize([run], values.detach().reshape(-1).contiguous(), codes, scales)
    return codes, scales, run


def read_back(fmt, values):
    """A matrix quantized whole, and dequantized."""
    codes, scales, run = quantized(fmt, values)
    out = torch.zeros(values.numel())
    fmt.dequantize([run], codes, scales, out)
    return out.view(values.shape)


def descend(params):
    with torch.no_grad():
        for param in params:
            param.sub_(0.1 * param.grad)
            param.grad = None


class Plain:
    """Full parameters, and a model whose blocks compute with what `codes_of` makes of their matrices."""

    def __init__(self, make, codes_of):
        self.masters: dict[str, Any] = dict(make().named_parameters())
        self.model, self.codes_of = make(), codes_of

    def step(self, step, microbatches=1):
        """One step of SGD on the mean over ranks of gradients in bf16."""
        for name, master in self.masters.items():
            path, _, last = name.rpartition(".")
            coded = name.startswith("blocks") and master.ndim == 2
            value = self.codes_of(master) if coded else master.detach().clone()
            setattr(self.model.get_submodule(path), last, torch.nn.Parameter(value))
        ranks = dist.get_world_size()
        for rank in range(ranks):
            for _ in range(microbatches):
                (loss_of(self.model, tokens(step, rank=rank)) / microbatches).backward()
            for name, param in self.model.named_parameters():
                sent = param.grad.bfloat16().float()
                self.masters[name].grad = self.masters[name].grad + sent if rank else sent
                param.grad = None
        for master in self.masters.values():
            master.grad = master.grad * (1 / ranks)
        descend(self.masters.values())


def accumulate(model, step, microbatches):
    """Backward of equal microbatches of this rank's batch, of which the last reduces."""
    for micro in range(microbatches):
        model.set_requires_gradient_sync(micro == microbatches - 1)
        (loss_of(model, tokens(step)) / microbatches).backward()


def assert_equal_bits(model, wanted):
    for name, param in model.named_parameters():
        assert param.full_tensor().equal(wanted[name]), name

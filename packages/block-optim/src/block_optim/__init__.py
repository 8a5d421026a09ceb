"""Optimizers that work on whole blocks of sharded parameters."""

from block_optim.adam.adamw import AdamW
from block_optim.adam.adamw8bit import AdamW8bit
from block_optim.core._torch_compat import local_of
from block_optim.core.base import BlockOptimizer
from block_optim.core.gradients import StepGradients
from block_optim.core.params import Param
from block_optim.ema import EMA
from block_optim.muon.muon import Muon
from block_optim.routing.mixed import Mixed
from block_optim.routing.recipe import Recipe
from block_optim.routing.routes import mixed_optimizer_for
from block_optim.shampoo.shampoo import Shampoo
from block_optim.shampoo.soap import SOAP

__version__ = "0.1.0"
__all__ = [
    "EMA",
    "SOAP",
    "AdamW",
    "AdamW8bit",
    "BlockOptimizer",
    "Mixed",
    "Muon",
    "Param",
    "Recipe",
    "Shampoo",
    "StepGradients",
    "local_of",
    "mixed_optimizer_for",
]

"""Optimizers that work on whole blocks of sharded parameters."""

from block_optim._adamw import AdamW
from block_optim._adamw8bit import AdamW8bit
from block_optim._base import BlockOptimizer
from block_optim._shampoo import Shampoo
from block_optim._soap import SOAP

__version__ = "0.1.0"
__all__ = ["AdamW", "BlockOptimizer", "SOAP", "Shampoo"]

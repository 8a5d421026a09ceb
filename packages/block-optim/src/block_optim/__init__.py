"""Optimizers that work on whole blocks of sharded parameters."""

from block_optim._adamw import AdamW
from block_optim._adamw8bit import AdamW8bit
from block_optim._base import BlockOptimizer
from block_optim._muon import Muon
from block_optim._newton_schulz import orthogonalize
from block_optim._qk_clip import qk_clip_
from block_optim._routing import param_groups_for
from block_optim._routing_mixed import Mixed
from block_optim._routing_policy import block_policy_for
from block_optim._shampoo import Shampoo
from block_optim._soap import SOAP

__version__ = "0.1.0"
__all__ = [
    "SOAP",
    "AdamW",
    "AdamW8bit",
    "BlockOptimizer",
    "Mixed",
    "Muon",
    "Shampoo",
    "block_policy_for",
    "orthogonalize",
    "param_groups_for",
    "qk_clip_",
]

"""The common part of all optimizers. Imports none of them."""

"""Routing of parameters to algorithms, and several algorithms as one optimizer. Imports all other folders."""

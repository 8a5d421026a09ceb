"""Ops on ragged tensors: one table (`table`) from ops to rules, one module for each kind of rule."""

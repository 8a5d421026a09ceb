"""Adapters to trainers, a module each: `fsdp_runtime.integrations.accelerate`.

Each imports its trainer where it is used, and changes nothing of it.
"""

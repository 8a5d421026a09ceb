"""Adapters to trainers, a module each: `fsdp_runtime.integrations.accelerate`.

Each imports its trainer when it is used.
"""

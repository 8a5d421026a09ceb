"""Writes packages/fsdp-runtime/CONFORMANCE.md from the cases of `tests/conformance`."""

from conformance_registry import table

from checks import RUNTIME

if __name__ == "__main__":
    (RUNTIME / "CONFORMANCE.md").write_text(table())

"""Encodings of gathers and reductions on the wire: unchanged, cast, or codes of blocks with scales."""

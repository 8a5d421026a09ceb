"""AdamW with fp32 and with 8-bit states. Knows core only."""

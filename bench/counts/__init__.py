"""What a step does, counted exactly: bytes, calls, collectives, live memory, Python calls."""

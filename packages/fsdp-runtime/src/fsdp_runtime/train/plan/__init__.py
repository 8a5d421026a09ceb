"""``fsdp-train plan``: what a run takes, on paper. `command` prints it."""

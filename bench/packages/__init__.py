"""One package each, without a training step around it."""

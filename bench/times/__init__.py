"""How long a step takes, and how much memory: all systems on the same work."""

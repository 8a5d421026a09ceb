"""When units gather and reduce: hooks, passes and the order of units."""

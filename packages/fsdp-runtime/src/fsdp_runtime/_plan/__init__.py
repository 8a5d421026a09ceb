"""Plans of a unit: meshes, dtypes, groups of parameters and their layouts. Frozen, made once."""

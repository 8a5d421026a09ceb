"""In which encoding gathers and reductions travel: as they are, cast, or as codes of blocks with scales."""

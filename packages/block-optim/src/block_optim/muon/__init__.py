"""Muon: momentum, orthogonalised by Newton-Schulz. Knows core only."""

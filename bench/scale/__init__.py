"""Large clusters on paper, and how layouts pad large models."""

"""Memory of units: predicted, measured, and kept within a budget."""

"""Results as one page with pictures."""

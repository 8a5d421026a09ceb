"""What every optimizer shares. Knows none of them."""

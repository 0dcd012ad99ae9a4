"""Search: finding a good strategy."""

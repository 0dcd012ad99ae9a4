"""Validation: predictions held against real runs of the same strategies."""

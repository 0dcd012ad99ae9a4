"""Strategies: how each block of a graph is split and placed."""

"""Costs: how long one task takes, measured or analytic."""

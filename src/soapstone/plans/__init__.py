"""Plans: what is saved of a decision, and how it is simulated again."""

from soapstone.plans.document import read_plan, write_plan, write_text
from soapstone.plans.plan import (
    COSTS,
    Plan,
    Prediction,
    Simulation,
    costs_named,
    planned,
    predicted,
    simulation,
)

__all__ = [
    "COSTS",
    "Plan",
    "Prediction",
    "Simulation",
    "costs_named",
    "planned",
    "predicted",
    "read_plan",
    "simulation",
    "write_plan",
    "write_text",
]

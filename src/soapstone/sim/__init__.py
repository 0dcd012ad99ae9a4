"""The simulator: a task graph becomes a timeline."""

"""Everything a user can do wrong, as exceptions that read as one sentence.

The message of a `SoapstoneError` says what was wrong, where, and what to do about it.
The command line prints it on standard error and exits with code 2; a library user catches
`SoapstoneError` and sees the same sentence. Anything else that escapes is a bug of ours.
"""

from __future__ import annotations


class SoapstoneError(Exception):
    """Base of all errors caused by what a user handed in."""


class OpError(SoapstoneError):
    """An operator was defined, or applied to shapes, in a way its notation does not allow."""


class GraphError(SoapstoneError):
    """A graph, or its text form, breaks one of the laws of `graph.verify`."""


class MachineError(SoapstoneError):
    """A machine description is incomplete, contradictory or names something unknown."""


class CaptureError(SoapstoneError):
    """A model could not be turned into a graph."""


class StrategyError(SoapstoneError):
    """A strategy asks for a split or a device that does not exist."""


class SearchError(SoapstoneError):
    """A search does not exist, or has nothing to decide."""


class CostError(SoapstoneError):
    """Measured costs are damaged, foreign, missing, or cannot be measured or kept."""


class PlanError(SoapstoneError):
    """A plan, or a file of one, is damaged, foreign or cannot be written."""


class TrainingError(SoapstoneError):
    """A plan cannot be run as asked: wrong number of ranks, wrong batch, a model of another plan, or
    a run that failed on the way."""


class CheckpointError(SoapstoneError):
    """A checkpoint is damaged, incomplete, of another model, or cannot be written."""


class RuleError(SoapstoneError):
    """A substitution, or a file of them, is not well formed, or cannot be applied as asked."""

"""Graphs: a computation as nodes and values."""

from soapstone.graph.build import GraphBuilder
from soapstone.graph.document import from_document, to_document
from soapstone.graph.graph import FLOATS, ITEM_BYTES, Graph, Node, Operand, Role, Value
from soapstone.graph.text import parsed, printed
from soapstone.graph.verify import verify

__all__ = [
    "FLOATS",
    "ITEM_BYTES",
    "Graph",
    "GraphBuilder",
    "Node",
    "Operand",
    "Role",
    "Value",
    "from_document",
    "parsed",
    "printed",
    "to_document",
    "verify",
]

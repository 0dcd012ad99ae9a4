"""Graphs read back as they were written."""

from __future__ import annotations

import json

from hypothesis import given, settings
from oracles.graphs import graphs

from soapstone.graph import Graph, from_document, parsed, printed, to_document, verify


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_text_reads_back(graph: Graph) -> None:
    """parsed(printed(g)) == g, and printing again gives the same text."""
    text = printed(graph)
    assert parsed(text) == graph
    assert printed(parsed(text)) == text


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_document_reads_back(graph: Graph) -> None:
    """from_document(to_document(g)) == g, through JSON."""
    assert from_document(json.loads(json.dumps(to_document(graph)))) == graph


@given(graphs())
@settings(max_examples=30, deadline=None)
def test_built_graphs_obey_the_laws(graph: Graph) -> None:
    """What the builder builds, verify accepts; every node knows its sample dim."""
    assert verify(graph) is graph
    counted = [node.name for node in graph.nodes if node.name in graph.sample_dims]
    assert counted == [node.name for node in graph.nodes if node.name != "mean"]  # which divides the loss

"""The native enumeration against plain Python: all graphs, and no others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soapstone.subst.checking import differs
from soapstone.subst.emitting import emitted
from soapstone.subst.enumerating import Enumeration
from soapstone.subst.families import Family, word
from soapstone.subst.generate import generate
from soapstone.subst.layout import Layout
from soapstone.subst.rulebook import shipped
from soapstone.subst.sizes import shapes_for
from soapstone.subst.term import Call, Side, Var

SMALL = Family(
    "small",
    (((2, 2), Layout((1, 1)), 2),),
    (word("matmul", 2), word("relu", 1), word("transpose", 1)),
    frozenset({2}),
    most_nodes=2,
    most_outputs=2,
)


def brute_force(family: Family) -> set[frozenset[Call]]:
    """Every set of nodes that uses variables in order and hangs together."""
    variables = [Var("v0"), Var("v1")]

    def extensions(nodes: frozenset[Call]) -> set[frozenset[Call]]:
        values = [*variables, *nodes]
        found = set()
        for template in family.templates:
            for args in itertools.product(values, repeat=len(template[0].args)):
                found.add(nodes | {Call(template[0].word, args, template[0].attrs)})
        return found - {nodes}

    level = {frozenset[Call]()}
    every: set[frozenset[Call]] = set()
    for _ in range(family.most_nodes):
        level = {larger for nodes in level for larger in extensions(nodes)}
        every |= level

    def used(call: Call) -> set[str]:
        return {name for arg in call.args for name in ({arg.name} if isinstance(arg, Var) else used(arg))}

    def is_wanted(nodes: frozenset[Call]) -> bool:
        names = [used(call) for call in nodes]
        hangs_together = len(nodes) == 1 or bool(set.intersection(*names))
        return hangs_together and "v0" in set.union(*names)

    return {nodes for nodes in every if is_wanted(nodes)}


def test_all_graphs_are_enumerated() -> None:
    enumeration = Enumeration(SMALL)
    enumeration.bank.equal_graphs(SMALL.most_nodes, SMALL.most_outputs)
    assert enumeration.bank.graph_count == len(brute_force(SMALL))


def test_graphs_of_a_class_agree_when_evaluated_in_numpy() -> None:
    rng = np.random.default_rng(0)
    values = {"v0": rng.standard_normal((2, 2)), "v1": rng.standard_normal((2, 2))}
    meaning = {"matmul": np.matmul, "relu": lambda x: np.maximum(x, 0), "transpose": np.transpose}

    def evaluate(term: object) -> np.ndarray:
        if isinstance(term, Var):
            return values[term.name]
        assert isinstance(term, Call)
        return meaning[term.word](*map(evaluate, term.args))

    def outputs(side: Side) -> list[np.ndarray]:
        return [evaluate(term) for term in side]

    classes = list(Enumeration(SMALL).classes())
    assert classes
    for found in classes:
        first = outputs(found.graphs[0])
        for other in found.graphs[1:]:
            for a, b in zip(first, outputs(other), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-12)


def test_generation_gives_the_same_rules_every_time() -> None:
    one, two = (list(map(str, generate([SMALL])[0].rules)) for _ in range(2))
    assert one == two
    assert "x:[1 1] | transpose(transpose(x)) | x" in one
    assert "x:[1 1] | transpose(relu(x)) | relu(transpose(x))" in one


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_shipped_rules_hold_at_other_degrees(data: st.DataObject) -> None:
    """Proofs are for every degree; here three devices instead of two, where sizes allow it."""
    rules = [each for each in shipped().rules if each.is_parallel]
    each = data.draw(st.sampled_from(rules), label="rule")
    degree = data.draw(st.sampled_from([3, 4]), label="degree")
    found = shapes_for(each, degree)
    if isinstance(found, tuple):
        assert differs(each, *found, seed=1) is None


@pytest.mark.parametrize("kind", ["split", "push", "pull", "sum", "replicate", "pipeline"])
def test_every_kind_of_parallelism_is_emitted_for_a_matrix_product(kind: str) -> None:
    from soapstone.ops import lookup

    assert any(each.name == f"matmul-{kind}" for each in emitted([lookup("matmul")]))

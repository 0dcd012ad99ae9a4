"""Rules: their text, their proofs, and that wrong ones are caught."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import pytest

from soapstone.errors import RuleError
from soapstone.ops.proof import Proved, Refuted, Unknown
from soapstone.subst.axioms import NAMED, Axiom, check
from soapstone.subst.checking import refutation
from soapstone.subst.layout import Objection
from soapstone.subst.proving import TIMEOUT_MS, Prover
from soapstone.subst.rulebook import read, shipped
from soapstone.subst.sizes import shapes_for, varied
from soapstone.subst.term import Rule, parse_rule, parse_side
from soapstone.subst.verifying import _placed, _Provers, judge, usual_functions
from soapstone.subst.words import Context

RANK_2 = frozenset({2})


@cache
def prover(rank: int = 2) -> Prover:
    return Prover(usual_functions(frozenset({rank})).values())


def rule(text: str) -> Rule:
    return parse_rule(f"rule | {text}")[0]


def verdict(text: str) -> object:
    return next(iter(judge([rule(text)]))).verdict


TRUE = [
    "x:[1 1] y:[1 1] z:[1 1] | add(matmul(x, y), matmul(x, z)) | matmul(x, add(y, z))",
    "x:[1 1] y:[1 1] z:[1 1] | matmul(matmul(x, y), z) | matmul(x, matmul(y, z))",
    "x:[1 1] y:[1 1] z:[1 1] | head[dim=1](linear(x, concat[dim=0](y, z))), "
    "tail[dim=1](linear(x, concat[dim=0](y, z))) | linear(x, y), linear(x, z)",
    "x:[k 1] y:[1 1] | matmul(combine[dim=0, degree=k](x), y) | "
    "combine[dim=0, degree=k](matmul(x, replicate[degree=k](y)))",
    "x:[1 1 +k] y:[1 1] | matmul(reduce[degree=k](x), y) | "
    "reduce[degree=k](matmul(x, replicate[degree=k](y)))",
    "x:[1 1] | softmax(x) | batch[dim=0, degree=k](softmax(pipeline[dim=0, degree=k](x)))",
    "x:[1 1] | mul(gelu(x), relu(x)) | mul(x, gelu(relu(x)))",
    "x:[1 1 1] y:[1 1] | merge(linear(x, y)) | linear(merge(x), y)",
    "x:[1 1] y:[1 1] z:[1 1] | embedding(x, concat[dim=1](y, z)) | "
    "concat[dim=2](embedding(x, y), embedding(x, z))",
]

TRUE_OF_KERNELS = [
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d[ph=1, pw=1](x, mean_kernel(y)) | "
    "avg_pool2d[kernel=3, stride=1, padding=1](x)",
    "x:[1 1 1 1] y:[1 1 1 1] z:[1 1 1 1] | concat[dim=1](conv2d(x, y), conv2d[ph=1, pw=1](x, z)) | "
    "conv2d[ph=1, pw=1](x, concat[dim=0](enlarge(y), z))",
]

WRONG = [
    # not true of any tensors
    "x:[1 1] y:[1 1] | matmul(x, y) | matmul(y, x)",
    "x:[1 1] y:[1 1] | relu(add(x, y)) | add(relu(x), relu(y))",
    "x:[1 1] y:[1 1] | softmax(concat[dim=1](x, y)) | concat[dim=1](softmax(x), softmax(y))",
    # true of square matrices cut in the middle, and of no others
    "x:[1 1] y:[1 1] z:[1 1] | linear(concat[dim=1](x, y), concat[dim=1](y, z)) | "
    "linear(concat[dim=1](y, x), concat[dim=1](z, y))",
    # layouts that do not agree: a sum was forgotten, a copy is missing, an axis must stay whole
    "x:[1 1] y:[1 1] | matmul(x, y) | matmul(partition[dim=1, degree=k](x), partition[dim=0, degree=k](y))",
    "x:[1 1] y:[1 1] | matmul(x, y) | combine[dim=0, degree=k](matmul(partition[dim=0, degree=k](x), y))",
    "x:[1 1] | softmax(x) | combine[dim=1, degree=k](softmax(partition[dim=1, degree=k](x)))",
    "x:[1 1 +k] | relu(reduce[degree=k](x)) | reduce[degree=k](relu(x))",
]


WRONG_ELSEWHERE = [
    # kernels, reshapes, lookups, attention, partial sums
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d[ph=1, pw=1](x, identity_kernel(y)) | "
    "conv2d[ph=1, pw=1](x, mean_kernel(y))",
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d[ph=1, pw=1](x, y) | conv2d[ph=1, pw=1](x, identity_kernel(y))",
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d[ph=1, pw=1](x, mean_kernel(y)) | "
    "max_pool2d[kernel=3, stride=1, padding=1](x)",
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d(x, enlarge(y)) | conv2d(x, y)",
    "x:[1 1 1 1] y:[1 1 1 1] z:[1 1 1 1] | concat[dim=1](conv2d(x, y), conv2d[ph=1, pw=1](x, z)) | "
    "conv2d[ph=1, pw=1](x, concat[dim=0](z, enlarge(y)))",
    "x:[1 1 1 1] y:[1 1 1 1] | enlarge(concat[dim=2](x, y)) | concat[dim=2](enlarge(x), enlarge(y))",
    "x:[1 1 1] y:[1 1 1] | merge(concat[dim=1](x, y)) | concat[dim=0](merge(x), merge(y))",
    "x:[1 1 1] | merge(transpose(x)) | transpose(merge(x))",
    "x:[1 1] y:[1 1] z:[1 1] | embedding(x, concat[dim=0](y, z)) | add(embedding(x, y), embedding(x, z))",
    "x:[1 1] y:[1 1] | embedding(x, relu(y)) | embedding(relu(x), y)",
    "x:[1 1 1] y:[1 1 1] z:[1 1 1] | sdpa(scale(x), y, z) | scale(sdpa(x, y, z))",
    "x:[1 1 1] y:[1 1 1] z:[1 1 1] | sdpa(x, y, z) | sdpa(x, z, y)",
    "x:[1 1 1] y:[1 1 1] z:[1 1 1] | sdpa(x, y, z) | "
    "combine[dim=1, degree=k](sdpa(replicate[degree=k](x), partition[dim=1, degree=k](y), parti"
    "tion[dim=1, degree=k](z)))",
    "x:[1 1 +k] | softmax(reduce[degree=k](x)) | reduce[degree=k](softmax(x))",
    "x:[1 1] | layer_norm(scale(x)) | scale(layer_norm(x))",
    "x:[1 1 +k] y:[1 1 +k] | matmul(reduce[degree=k](x), reduce[degree=k](y)) | "
    "reduce[degree=k](matmul(x, y))",
]


NEVER_WELL_FORMED = [
    # a first axis of one would do; no sizes would
    "x:[1 k 1] | merge(combine[dim=1, degree=k](x)) | combine[dim=0, degree=k](merge(x))",
    "x:[1 1 1] y:[1 1 1] z:[1 1 1] w:[1 1 1] | sdpa(x, y, concat[dim=1](z, w)) | "
    "concat[dim=1](sdpa(x, y, z), sdpa(x, y, w))",
]


@pytest.mark.parametrize("text", NEVER_WELL_FORMED)
def test_what_fits_no_sizes_that_were_tried_is_unknown(text: str) -> None:
    assert isinstance(verdict(text), Unknown)


@pytest.mark.parametrize("text", TRUE)
def test_a_true_rule_is_proved(text: str) -> None:
    assert verdict(text) == Proved()


def test_true_rules_about_constant_kernels_are_proved() -> None:
    """Average pooling is a convolution, and a kernel with a border of zeros goes beside a larger one."""
    found = judge(map(rule, TRUE_OF_KERNELS))
    assert [each.verdict for each in found] == [Proved()] * len(TRUE_OF_KERNELS)


@pytest.mark.parametrize("text", WRONG + WRONG_ELSEWHERE)
def test_a_planted_wrong_rule_is_refuted_with_a_reason(text: str) -> None:
    found = verdict(text)
    assert isinstance(found, Refuted)
    assert found.counterexample


WRONG_FAR_OUT = [
    # true of small tensors, where a number of an attribute is beyond every element
    "x:[1 1] | triu[diagonal=-100](x) | x",
    "x:[1 1] | tril[diagonal=100](x) | x",
    "x:[1 1] | triu[diagonal=-9](x) | triu[diagonal=-10](x)",
    "x:[1 1] y:[1 1] | triu[diagonal=100](x) | triu[diagonal=100](y)",
    "x:[1 1] | transpose(triu[diagonal=100](x)) | triu[diagonal=100](transpose(x))",
    "x:[1 1] y:[1 1] | triu[diagonal=100](concat[dim=0](x, y)) | "
    "concat[dim=0](triu[diagonal=100](x), triu[diagonal=100](y))",
    "x:[1 1] | triu[diagonal=100](head[dim=0](x)) | head[dim=0](triu[diagonal=100](x))",
    "x:[1 1] | roll[shifts=(48), dims=(0)](x) | x",
    "x:[1 1] | roll[shifts=(48), dims=(0)](head[dim=0](x)) | head[dim=0](roll[shifts=(48), dims=(0)](x))",
]


@pytest.mark.parametrize("text", WRONG_FAR_OUT)
def test_what_holds_of_small_tensors_alone_is_not_proved(text: str) -> None:
    assert verdict(text) != Proved()


def test_what_holds_wherever_an_element_is_is_proved() -> None:
    text = "x:[1 1] y:[1 1] | triu[diagonal=3](add(x, y)) | add(triu[diagonal=3](x), triu[diagonal=3](y))"
    assert verdict(text) == Proved()


def test_a_rule_that_cannot_be_written_out_is_unknown_and_the_next_is_judged() -> None:
    texts = [
        "x:[1 1] | slice[dim=0, start=0, end=4](x) | x",
        "x:[1 1] | softmax[dim=last](x) | x",
        "x:[1 1] | relu(relu(x)) | relu(x)",
    ]
    *odd, plain = (each.verdict for each in judge(map(rule, texts)))
    assert all(isinstance(each, Unknown) for each in odd)
    assert plain == Proved()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a | x:[1 1] | relu[slope=3](x) | x", "line 2: 'relu' has no attribute 'slope'"),
        ("a | x:[1 1] | reluu(x) | x", "line 2: there is no operator 'reluu'"),
    ],
)
def test_words_of_a_book_are_checked_where_they_stand(line: str, sentence: str, tmp_path: Path) -> None:
    book = tmp_path / "mine.rules"
    book.write_text(f"# mine\n{line} | proved\n", encoding="utf-8")
    with pytest.raises(RuleError) as raised:
        read(book)
    assert f"{book}, {sentence}" in str(raised.value)


@pytest.mark.parametrize("text", WRONG)
def test_z3_alone_proves_no_wrong_rule(text: str) -> None:
    """Were the random tensors to miss a wrong rule, the proof would still not be found."""
    assert prover().prove(rule(text)) != Proved()


def test_a_planted_wrong_axiom_is_caught_by_its_check() -> None:
    sides = [
        ("matmul(x, y)", "matmul(y, x)"),
        ("relu(scale(x))", "scale(relu(x))"),
        ("head[dim=0](concat[dim=0](x, y))", "y"),
        ("transpose(matmul(x, y))", "matmul(transpose(x), transpose(y))"),
        ("softmax(add(x, y))", "add(softmax(x), softmax(y))"),
        ("concat[dim=0](x, y)", "concat[dim=0](y, x)"),
    ]
    sides += [
        ("mul(x, scale(y))", "add(mul(x, y), x)"),
        ("linear(x, transpose(y))", "linear(y, transpose(x))"),
        ("concat[dim=1](matmul(x, y), x)", "matmul(x, concat[dim=0](y, x))"),
        ("tail[dim=1](softmax(x))", "softmax(tail[dim=1](x))"),
    ]
    for left, right in sides:
        domain = dict.fromkeys(("x", "y"), (2, 2))
        planted = Axiom("planted", parse_side(left)[0], parse_side(right)[0], domain, "named")
        assert isinstance(check(planted, Context()), Refuted), left


@pytest.mark.parametrize(
    ("left", "right", "x", "y"),
    [
        ("conv2d[ph=1, pw=1](x, identity_kernel(y))", "avg_pool2d[kernel=3, stride=1, padding=1](x)", 2, 3),
        ("conv2d[ph=1, pw=1](x, mean_kernel(y))", "x", 2, 3),
        ("conv2d[ph=1, pw=1](x, y)", "conv2d(x, enlarge(y))", 2, 1),
        ("conv2d[ph=1, pw=1](x, enlarge(y))", "conv2d[ph=1, pw=1](x, identity_kernel(enlarge(y)))", 2, 1),
        ("enlarge(add(x, y))", "add(enlarge(x), enlarge(enlarge(y)))", 1, 1),
    ],
)
def test_a_planted_wrong_axiom_about_kernels_is_caught(left: str, right: str, x: int, y: int) -> None:
    domain = {"x": (2, 2, x, x), "y": (2, 2, y, y)}
    planted = Axiom("planted", parse_side(left)[0], parse_side(right)[0], domain, "named")
    assert isinstance(check(planted, Context()), Refuted)


def test_a_wrong_axiom_would_prove_a_wrong_rule() -> None:
    """The check above guards something: with the axiom let in, Z3 believes it."""
    wrong = rule("x:[1 1] y:[1 1] | matmul(x, y) | matmul(y, x)")
    own = Prover(usual_functions(RANK_2).values(), prover().axioms)
    assert isinstance(own.prove(wrong), Unknown)
    sides = parse_side("matmul(x, y)")[0], parse_side("matmul(y, x)")[0]
    own.add(Axiom("planted", *sides, dict.fromkeys(("x", "y"), (2, 2)), "named"))
    assert own.prove(wrong) == Proved()


@pytest.mark.parametrize("rank", [2, 3])
def test_axioms_are_consistent(rank: int) -> None:
    """No contradiction follows from them at once, as it does from TASO's with concat's associativity."""
    sizes = ", ".join(["1"] * rank).replace(",", "")
    absurd = rule(f"x:[{sizes}] y:[{sizes}] z:[{sizes}] | concat[dim=0](concat[dim=0](x, y), z) | x")
    assert prover(rank).prove(absurd) != Proved()
    unequal = rule(f"x:[{sizes}] y:[{sizes}] | x | y")
    assert prover(rank).prove(unequal) != Proved()


def test_every_axiom_says_where_it_is_checked_and_few_are_named() -> None:
    named = {axiom.name for axiom in prover().axioms if axiom.origin == "named"}
    assert named <= NAMED.keys()
    assert all(axiom.domain for axiom in prover().axioms)
    assert len(named) < 6
    assert len(prover().axioms) > 60


def test_the_verifier_stops_in_time() -> None:
    """A rule that is true but needs more than it is given ends as Unknown, and soon."""
    chain = "x"
    for _ in range(12):
        chain = f"matmul({chain}, add(x, y))"
    other = chain.replace("add(x, y)", "add(y, x)", 1).replace("matmul(x, ", "linear(x, ", 1)
    text = f"x:[1 1] y:[1 1] | {chain} | {other}"
    begun = time.perf_counter()
    hurried = Prover(usual_functions(RANK_2).values(), prover().axioms, timeout_ms=200)
    found = hurried.prove(rule(text))
    assert isinstance(found, Unknown)
    assert time.perf_counter() - begun < 30


def test_a_verdict_does_not_depend_on_what_was_proved_before() -> None:
    """Two rules about the same operators at different shapes: each rests on the axioms that it would rest on
    alone, in either order, and is proved."""
    first, second = "merge-relu", "merge-relu-partition"
    rules = [shipped().entry(name).rule for name in (first, second)]
    rested_on = []
    for order in (rules, rules[::-1]):
        provers = _Provers(TIMEOUT_MS)
        assert [provers.verdict(each) for each in order] == [Proved(), Proved()]
        placed = {each.name: _placed(each) for each in rules}
        rested_on.append(
            {
                name: [str(axiom) for axiom in provers._prover(found).axioms]
                for name, found in placed.items()
                if not isinstance(found, Objection)
            }
        )
    assert rested_on[0].keys() == {first, second}
    assert rested_on[0] == rested_on[1]


def test_a_rule_reads_back_as_it_was_written() -> None:
    for entry in shipped().entries.values():
        again, status = parse_rule(f"{entry.rule.name} | {entry.rule} | {entry.status}")
        assert again == entry.rule
        assert status == "proved"


def test_more_rules_are_shipped_than_the_paper_has() -> None:
    assert len(shipped().rules) > 743 + 651


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a | x:[1 1] | relu(x)", "which 'a | x:[1 1] | relu(x)' is not"),
        ("a | x:[1 1] | relu(y) | x", "uses 'y', which it does not declare"),
        ("a | x:[1 1] | relu(x | x", "a ')' is missing"),
        ("a | x:[1 1] | relu(x), x | x", "has 2 outputs on the left, 1 on the right"),
        ("a | x | relu(x) | x", "declares no variable"),
        ("a | x:[q! 1] | relu(x) | x", "is no degree"),
        ("a | x:[1 1] | concat[0](x, x) | x", "is no attribute"),
        ("a | x:[1 1] | softmax[dim=](x) | x", "'dim=' is no attribute (name=value)"),
    ],
)
def test_a_line_that_is_no_rule_is_refused(line: str, sentence: str) -> None:
    with pytest.raises(RuleError) as raised:
        parse_rule(line)
    assert sentence in str(raised.value)


def test_random_tensors_see_what_fingerprints_cannot() -> None:
    assert refutation(rule("x:[1 1] | relu(x) | x")) is not None
    assert refutation(rule("x:[1 1] | relu(relu(x)) | relu(x)")) is None


def test_sizes_differ_where_they_may() -> None:
    product = rule("x:[1 1] y:[1 1] | matmul(x, y) | linear(x, transpose(y))")
    found = shapes_for(product)
    assert isinstance(found, tuple)
    sizes = [varied(product, *found, seed)[0] for seed in range(5)]
    assert all(shapes["x"][1] == shapes["y"][0] for shapes in sizes)
    assert any(shapes["x"][0] != shapes["x"][1] != shapes["y"][1] for shapes in sizes)

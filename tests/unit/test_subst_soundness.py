"""What the prover must never say: that a false rule is proved, or that a true one is refuted."""

from __future__ import annotations

from pathlib import Path

import pytest

from soapstone.errors import RuleError
from soapstone.ops.proof import Proved, Refuted, Unknown, Verdict
from soapstone.subst.axioms import Axiom, check
from soapstone.subst.checking import refutation
from soapstone.subst.layout import Objection
from soapstone.subst.proving import Prover, functions_in
from soapstone.subst.rulebook import read
from soapstone.subst.sizes import settings, shapes_for, types_for
from soapstone.subst.term import Rule, parse_rule, parse_side
from soapstone.subst.verifying import judge
from soapstone.subst.words import Context


def rule(text: str) -> Rule:
    return parse_rule(f"rule | {text}")[0]


def verdicts(texts: list[str]) -> dict[str, Verdict]:
    return {text: each.verdict for text, each in zip(texts, judge(map(rule, texts)), strict=True)}


def proof_alone(text: str) -> Verdict:
    """What Z3 says from the axioms about the rule's own functions, which take a moment to derive."""
    given = rule(text)
    found = shapes_for(given)
    assert not isinstance(found, Objection)
    types = types_for(given, *found)
    assert not isinstance(types, Objection)
    return Prover(functions_in(given.left + given.right, types, found[1])).prove(given)


FALSE_FOR_SOME_ATTRIBUTES = [
    "x:[1 1] y:[1 1] | softmax[*](concat[dim=0](x, y)) | concat[dim=0](softmax[*](x), softmax[*](y))",
    "x:[1 1] y:[1 1] | add[*](x, y) | add[*](y, x)",
    "x:[1 1] y:[1 1] | relu(add[*](x, y)) | relu(add[*](y, x))",
    "x:[1 1] y:[1 1] z:[1 1] | add[*](add[*](x, y), z) | add[*](x, add[*](y, z))",
    "x:[1 1] y:[1 1] z:[1 1] | addcmul[*](x, y, z) | addcmul[*](x, z, y)",
    "x:[1 1] y:[1 1] z:[1 1] | div[*](add(x, z), y) | add(div[*](x, y), div[*](z, y))",
    "x:[1 1] | scale(leaky_relu[*](x)) | leaky_relu[*](scale(x))",
    "x:[1 1] y:[1 1] | cumsum[*](concat[dim=0](x, y)) | concat[dim=0](cumsum[*](x), cumsum[*](y))",
    "x:[1 1] | transpose(tril[*](x)) | triu[*](transpose(x))",
    "x:[1 1 1] y:[1 1 1] | layer_norm[*](concat[dim=1](x, y)) | "
    "concat[dim=1](layer_norm[*](x), layer_norm[*](y))",
    "x:[1 1 1] y:[1 1 1] | mean[*](concat[dim=0](x, y)) | concat[dim=0](mean[*](x), mean[*](y))",
    "x:[1 1 1] y:[1 1 1] | flip[*](concat[dim=0](x, y)) | concat[dim=0](flip[*](x), flip[*](y))",
    "x:[1 1] y:[1] z:[1 1] | index_select[*](concat[dim=1](x, z), y) | "
    "concat[dim=1](index_select[*](x, y), index_select[*](z, y))",
    "x:[1 1 1 1] y:[1 1 1 1] z:[1 1 1 1] | conv2d[*](x, concat[dim=0](y, z)) | "
    "concat[dim=1](conv2d[*](x, y), conv2d[*](x, z))",
    "x:[1 1 1 1] y:[1 1 1 1] z:[1 1 1 1] w:[1 1 1 1] | sdpa[*](concat[dim=2](x, w), y, z) | "
    "concat[dim=2](sdpa[*](x, y, z), sdpa[*](w, y, z))",
]

FALSE_OF_RANDOM_NUMBERS = [
    "x:[1 1] y:[1 1] | dropout[p=0.000001](concat[dim=0](x, y)) | "
    "concat[dim=0](dropout[p=0.000001](x), dropout[p=0.000001](y))",
    "x:[1 1] | transpose(dropout[p=0.000001](x)) | dropout[p=0.000001](transpose(x))",
    "x:[1 1] | head[dim=0](dropout[p=0.000001](x)) | dropout[p=0.000001](head[dim=0](x))",
    "x:[1 1] | sub(dropout(x), dropout(combine[dim=0, degree=k](partition[dim=0, degree=k](x)))) | "
    "sub(dropout(x), dropout(x))",
    "x:[1 1] | sub(dropout(relu(x)), dropout(relu(relu(x)))) | sub(dropout(relu(x)), dropout(relu(x)))",
]

FALSE_AT_OTHER_SIZES = [
    "x:[1 1] | transpose(reshape[shape=(2 2)](x)) | reshape[shape=(2 2)](transpose(x))",
    "x:[1 1] | slice[dim=0, start=0, end=4](relu(relu(x))) | relu(x)",
]

FALSE_AT_OTHER_WINDOWS = [
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d[sh=2, sw=2](x, mean_kernel(y)) | avg_pool2d[kernel=1, stride=2](x)",
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d[dh=2, dw=2, sh=2, sw=2](x, y) | "
    "conv2d[sh=2, sw=2, ph=1, pw=1](x, enlarge(y))",
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d[dh=3, dw=3, sh=4, sw=4](x, y) | "
    "conv2d[sh=4, sw=4, ph=1, pw=1](x, enlarge(y))",
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d[dh=2, dw=2](x, y) | conv2d[ph=1, pw=1](x, enlarge(y))",
]

TRUE_AT_ODD_SIZES = [
    "x:[1 1] | reshape[shape=(5 7)](relu(x)) | relu(reshape[shape=(5 7)](x))",
    "x:[1 1] | reshape[shape=(3 11)](x) | copy(reshape[shape=(3 11)](x))",
    "x:[1 1] | slice[dim=0, start=5, end=17](relu(x)) | relu(slice[dim=0, start=5, end=17](x))",
    "x:[1 1 1 1] y:[1 1 1 1] | conv2d[g=3](x, scale(y)) | scale(conv2d[g=3](x, y))",
    "x:[1 1 1 1] y:[1 1 1 1] | avg_pool2d[kernel=7](add(x, y)) | "
    "add(avg_pool2d[kernel=7](x), avg_pool2d[kernel=7](y))",
    "x:[1 1 1] | group_norm[groups=5](x) | group_norm[groups=5](copy(x))",
    "x:[1 1] | relu(x) | combine[dim=0, degree=5](relu(partition[dim=0, degree=5](x)))",
    "x:[1 1 1 1] | relu(max_pool2d[kernel=3, stride=2](x)) | max_pool2d[kernel=3, stride=2](relu(x))",
]


def test_any_attributes_are_not_those_of_one_example() -> None:
    found = verdicts(FALSE_FOR_SOME_ATTRIBUTES)
    assert not [text for text, verdict in found.items() if verdict == Proved()]
    assert sum(isinstance(verdict, Refuted) for verdict in found.values()) >= 9


def test_what_holds_for_any_attributes_is_proved() -> None:
    """An operator with `[*]` is some function of its operands, and that is enough for these."""
    texts = [
        "x:[1 1] | softmax[*](relu(relu(x))) | softmax[*](relu(x))",
        "x:[1 1] y:[1 1] | relu(relu(add[*](x, y))) | relu(add[*](x, y))",
        "x:[1 1] y:[1 1] z:[1 1] | mul(gelu[*](x), add(y, z)) | mul(gelu[*](x), add(z, y))",
        "x:[k 1] | softmax[*](combine[dim=0, degree=k](x)) | combine[dim=0, degree=k](softmax[*](x))",
    ]
    assert set(verdicts(texts).values()) == {Proved()}


def test_a_refutation_says_what_any_attributes_were() -> None:
    found = refutation(rule("x:[1 1] y:[1 1] | add[*](x, y) | add[*](y, x)"))
    assert isinstance(found, Refuted)
    assert "add[alpha=2]" in found.counterexample


def test_random_numbers_are_no_function_of_the_operands() -> None:
    found = verdicts(FALSE_OF_RANDOM_NUMBERS)
    assert not [text for text, verdict in found.items() if verdict == Proved()]
    planted = Axiom("planted", *parse_side("transpose(dropout(x)), dropout(transpose(x))"), {"x": (2, 2)}, "")
    assert check(planted, Context()) != Proved()


def test_how_a_random_operator_lies_over_devices_is_proved() -> None:
    text = "x:[1 1] | dropout(x) | combine[dim=0, degree=k](dropout(partition[dim=0, degree=k](x)))"
    assert verdicts([text]) == {text: Proved()}


@pytest.mark.parametrize("text", FALSE_AT_OTHER_WINDOWS + FALSE_AT_OTHER_SIZES)
def test_what_holds_at_one_window_is_not_proved_for_others(text: str) -> None:
    assert isinstance(proof_alone(text), Unknown)


@pytest.mark.parametrize(
    "text",
    [
        "x:[1 1 1 1] y:[1 1 1 1] | conv2d(x, mean_kernel(y)) | avg_pool2d[kernel=3, stride=1](x)",
        "x:[1 1 1 1] y:[1 1 1 1] | conv2d(x, identity_kernel(y)) | x",
        "x:[1 1 1 1] y:[1 1 1 1] | conv2d[sh=2, sw=2](x, y) | conv2d[sh=2, sw=2, ph=1, pw=1](x, enlarge(y))",
        "x:[1 1 1 1] y:[1 1 1 1] | conv2d[dh=2, dw=2](x, y) | conv2d[dh=2, dw=2, ph=2, pw=2](x, enlarge(y))",
    ],
)
def test_constant_kernels_are_known_where_the_window_is(text: str) -> None:
    assert proof_alone(text) == Proved()


@pytest.mark.parametrize("text", TRUE_AT_ODD_SIZES)
def test_a_true_rule_is_looked_at_where_its_numbers_fit(text: str) -> None:
    assert not isinstance(settings(rule(text)), Objection)
    assert refutation(rule(text)) is None


@pytest.mark.parametrize("rank", [0, 5, 6, 9, 30])
def test_values_may_have_any_number_of_axes(rank: int) -> None:
    text = f"x:[{' '.join(['1'] * rank)}] | relu(relu(x)) | relu(x)"
    assert verdicts([text]) == {text: Proved()}


@pytest.mark.parametrize(
    "text",
    [
        "x:[1 1] | reshape[shape=(1000 1000)](relu(x)) | relu(reshape[shape=(1000 1000)](x))",
        "x:[1 1] | concat[dim=0](head[dim=0](x), tail[dim=0](x)) | slice[dim=0, start=0, end=100](x)",
        "x:[k 1] | combine[dim=0, degree=3](x) | combine[dim=0, degree=k](x)",
    ],
)
def test_what_fits_none_of_the_sizes_tried_is_unknown_and_says_so(text: str) -> None:
    found = verdicts([text])[text]
    assert isinstance(found, Unknown)
    assert found.reason.startswith("none of the sizes tried fits: ")


def test_sides_that_lie_differently_are_refuted_in_the_language_of_rules() -> None:
    split = "linear(partition[dim=1, degree=k](x), partition[dim=1, degree=k](y))"
    text = f"x:[1 1] y:[1 1] | linear(x, y) | {split}"
    found = verdicts([text])[text]
    assert found == Refuted(
        "with x 4x4, y 4x4, the left side is 4x4 on one device, the right side 4x4 laid out as [1 1 +2]"
    )


def test_numbers_that_print_alike_are_printed_longer() -> None:
    found = refutation(rule("x:[1 1] | gelu(x) | gelu[approximate=tanh](x)"))
    assert isinstance(found, Refuted)
    left, right = found.counterexample.partition(" is ")[2].split(" on the ")[:2]
    assert left != right.removeprefix("left and ")


def test_one_odd_rule_is_unknown_and_the_rest_is_judged() -> None:
    """A window larger than the image it moves over has no elements, and shows nothing."""
    odd = "x:[1 1] | opaque(x) | opaque(x)"
    plain = "x:[1 1] | relu(relu(x)) | relu(x)"
    found = verdicts([odd, plain])
    assert isinstance(found[odd], Unknown)
    assert found[plain] == Proved()
    sides = parse_side("max_pool2d[kernel=3, stride=2](x), max_pool2d[kernel=3, stride=2](relu(x))")
    assert isinstance(check(Axiom("planted", *sides, {"x": (2, 2, 2, 2)}, ""), Context()), Refuted)


DEEP = f"{'relu(' * 300}x{')' * 300}"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a | x:[1 1] | scale[by=2](x) | scale[by=3](x)", "'scale' has no attribute 'by'"),
        ("a | x:[1 1] | transpose[dims=(0 1)](x) | transpose(x)", "'transpose' has no attribute 'dims'"),
        ("a | x:[1 1 1] | merge[dim=1](x) | merge(x)", "'merge' has no attribute 'dim'"),
        ("a | x:[1 1] | scale[*](x) | x", "'scale' has no attribute '*'"),
        ("a | x:[1 1] | head(x) | x", "'head' needs the axis that is cut"),
        ("a | x:[1 1] | head[dim=-1](x) | x", "'head' needs the axis that is cut"),
        ("a | x:[1 1] y:[1 1] | scale(x, y) | x", "'scale' takes 1 operand, not 2"),
        ("a | x:[1 1] y:[1 1] | relu(x, y) | x", "'relu' takes 1 operand, not 2"),
        ("a | x:[1 1] | partition[dim=0, degree=-2](x) | x", "the degree of 'partition' is k or a whole"),
        ("a | x:[1 1] | partition[dim=0, degree=1.5](x) | x", "the degree of 'partition' is k or a whole"),
        ("a | x:[1 1] | cumsum[dim=k](x) | x", "only a degree is k"),
        (f"a | x:[1 1] | {DEEP} | x", "nested more than 64 deep"),
        ("a | x:[² 1] | relu(x) | x", "'²' is no degree"),
        ("a | x:[0 1] | relu(x) | x", "'0' is no degree"),
        (f"a | x:[{'1' * 5000} 1] | relu(x) | x", "is no degree"),
        (" | x:[1 1] | relu(x) | x", "has no name"),
        ("a | x:[1 1] x:[1 1] | relu(x) | x", "variable 'x' is declared twice"),
        ("a | x:[1 1] | softmax[dim=0, dim=1](x) | x", "attribute 'dim' is given twice"),
        ("first | x:[1 1] | relu(x) | x", "there is a rule 'first' already, in "),
    ],
)
def test_a_line_that_means_nothing_is_refused_where_it_stands(
    line: str, sentence: str, tmp_path: Path
) -> None:
    book = tmp_path / "mine.rules"
    book.write_text(f"first | x:[1 1] | relu(relu(x)) | relu(x)\n{line}\n", encoding="utf-8")
    with pytest.raises(RuleError) as raised:
        read(book)
    assert str(raised.value).startswith(f"{book}, line 2: ")
    assert sentence in str(raised.value)
    assert len(str(raised.value)) < 400


def test_permutations_in_a_row_are_one() -> None:
    """The value as it was, or the third one; and not another."""
    twice = "x:[1 1 1] | permute[dims=(1 2 0)](permute[dims=(1 2 0)](x))"
    right = [
        f"{twice} | permute[dims=(2 0 1)](x)",
        "x:[1 1 1] | permute[dims=(1 2 0)](permute[dims=(2 0 1)](x)) | x",
        "x:[1 1 1] | permute[dims=(0 2 1)](permute[dims=(1 0 2)](x)) | permute[dims=(1 2 0)](x)",
    ]
    wrong = [f"{twice} | x", f"{twice} | permute[dims=(1 2 0)](x)"]
    assert set(verdicts(right).values()) == {Proved()}
    assert all(isinstance(verdict, Refuted) for verdict in verdicts(wrong).values())


@pytest.mark.parametrize("word", ["permute[dims=(0 1 2 3 4 5 6 7 9 8)]", "transpose"])
def test_axes_of_one_element_do_not_hide_that_they_are_exchanged(word: str) -> None:
    """Samples of so many axes have single ones, to be small."""
    wrong = f"x:[{' '.join('1' * 10)}] | {word}({word}(x)) | {word}(x)"
    assert Proved() not in verdicts([wrong]).values()

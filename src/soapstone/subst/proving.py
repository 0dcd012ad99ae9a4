"""Proofs of rules by Z3, from axioms, for all sizes and degrees.

A rule holds when, for any sizes at which both sides are well formed and their outputs agree in shape,

    both sides lie over devices in the same way: layouts, worked out with a symbol for the degree, are equal;
    both sides are the same value: their terms, without the parallel operators (each the identity on values),
    are equal by the axioms; or all their operators take elements one by one, and the bodies are equal.

Tensors are an uninterpreted sort. Every axiom is guarded by the sizes at which it makes sense, because
without sizes "concat associates" and "the parts of a concat are what was concatenated" contradict each other.
Of an operator whose attributes may be any (`[*]`) nothing is known but that it is a function of its operands.
Axioms are instantiated only where one of their sides occurs (triggers), and Z3 has a limit of time and of
steps, so a proof ends: `Proved`, `Refuted` with a counterexample from `checking`, or `Unknown`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import z3

from soapstone.ops.proof import Proved, Unknown, Verdict
from soapstone.subst.axioms import Axiom, Deriving, is_pointwise
from soapstone.subst.degree import Symbolic, as_z3
from soapstone.subst.elements import all_equal, symbols, written_out
from soapstone.subst.functions import TENSOR, Function, size
from soapstone.subst.layout import Layout, Objection, is_parallel
from soapstone.subst.sizes import Setting, settings
from soapstone.subst.term import Call, Rule, Side, Term, Var, calls, erased
from soapstone.subst.words import CUTS, Context, Typed, types_of

STEPS = 20_000_000
"""Z3's own count of work ("rlimit") after which it gives up: the same on every computer."""

TIMEOUT_MS = 30_000
"""For what does not count its steps: on a busy computer, too, steps and not the clock must end a proof."""


class Encoding:
    """Terms in Z3: variables, cuts, and what is known of their sizes."""

    def __init__(self, functions: Mapping[Any, Function], mark: str = "") -> None:
        self.functions = functions
        self.mark = mark
        self.variables: dict[str, Any] = {}
        self.ranks: dict[Term, int] = {}
        self.cuts: dict[Any, Any] = {}
        self.terms: dict[Term, Any] = {}
        self.conditions: list[Any] = []
        self.sizes: list[Any] = []

    def declare(self, name: str, rank: int) -> None:
        """A variable."""
        self.variables[name] = z3.Const(f"{name}{self.mark}", TENSOR)
        self.ranks[Var(name)] = rank

    def term(self, term: Term) -> Any:
        """A term, without its parallel operators; notes its conditions and sizes."""
        found = self.terms.get(term)
        if found is None:
            found = self.terms[term] = self._encoded(term)
        return found

    def _encoded(self, term: Term) -> Any:
        if isinstance(term, Var):
            return self.variables[term.name]
        args = [self.term(arg) for arg in term.args]
        ranks = tuple(self.ranks[arg] for arg in term.args)
        if is_parallel(term.word):
            self.ranks[term] = ranks[0]
            return args[0]
        function = self.functions[term.word, term.attrs, ranks]
        cut = self.cut(term) if term.word in CUTS else None
        self.ranks[term] = len(function.result)
        result = function.symbol(*([cut] if cut is not None else []), *args)
        self.conditions += function.conditions(args, cut)
        for axis, measure in enumerate(function.sizes(args, cut)):
            self.sizes.append(size(result, axis) == measure)
        return result

    def cut(self, call: Call) -> Any:
        """The position of a cut: one for each value and axis, whichever part is taken."""
        dim = dict(call.attrs)["dim"]
        assert isinstance(dim, int)
        return self.position((erased(call.args[0]), dim))

    def position(self, key: Any) -> Any:
        """A position by the name under which it is known."""
        return self.cuts.setdefault(key, z3.Int(f"cut{len(self.cuts)}{self.mark}"))


class AxiomEncoding(Encoding):
    """An axiom in Z3: its cuts are at one position, but for those of what it is about."""

    def __init__(self, functions: Mapping[Any, Function], axiom: Axiom) -> None:
        super().__init__(functions, "'")
        self.subject = axiom.subject

    def cut(self, call: Call) -> Any:
        return self.position((call.word, call.attrs) == self.subject)


def functions_in(side: Side, types: Mapping[Term, Typed], context: Context) -> Iterator[Function]:
    """The functions that occur in a side, at the shapes it has."""
    for call in calls(side):
        if not is_parallel(call.word):
            yield Function(call.word, call.attrs, tuple(types[arg].shape for arg in call.args), context)


class Prover:
    """The axioms about some functions, ready for proofs."""

    def __init__(
        self,
        functions: Iterable[Function],
        axioms: Iterable[Axiom] | None = None,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        self.functions = {function.key: function for function in functions}
        derived = Deriving(self.functions.values()).axioms() if axioms is None else axioms
        self.axioms = tuple(derived)
        self.timeout_ms = timeout_ms
        self._formulas: dict[Axiom | Any, Any] = {}

    def add(self, axiom: Axiom) -> None:
        """Use one more axiom; nothing is checked here."""
        self.axioms = (*self.axioms, axiom)

    def prove(self, rule: Rule) -> Verdict:
        """Whether a rule follows from the axioms; never Refuted."""
        layouts = symbolic_layouts(rule)
        if isinstance(layouts, Objection):
            return Unknown(f"its layouts do not work out for every degree: {layouts.reason}")
        encoding = Encoding(self.functions)
        for name, layout in rule.variables.items():
            encoding.declare(name, len(layout.degrees))
        goals = []
        for one, two in zip(rule.left, rule.right, strict=True):
            goals.append(encoding.term(one) == encoding.term(two))
            for known in layouts:
                goals += _same_layout(known[one], known[two])
        solver = self._solver(encoding)
        for one, two in zip(rule.left, rule.right, strict=True):
            for axis in range(encoding.ranks[one]):
                solver.add(size(encoding.terms[one], axis) == size(encoding.terms[two], axis))
        solver.add(z3.Not(z3.And(*goals)))
        result = solver.check()
        if result == z3.unsat or self._holds_at_a_point(rule):
            return Proved()
        return Unknown(f"no proof was found: {_why(solver.reason_unknown() if result == z3.unknown else '')}")

    def _holds_at_a_point(self, rule: Rule) -> bool:
        """Whether all operators take elements one by one, and Z3 proves the rule for one element."""
        sides = tuple(erased(term) for term in rule.left), tuple(erased(term) for term in rule.right)
        ranks = {len(layout.degrees) for layout in rule.variables.values()}
        words = list(calls(sides[0] + sides[1]))
        if len(ranks) != 1 or not words:
            return False
        (rank,) = ranks
        known = [self.functions.get((call.word, call.attrs, (rank,) * len(call.args))) for call in words]
        if not all(function is not None and is_pointwise(function) for function in known):
            return False
        values = {name: symbols(name, (1,) * rank) for name in rule.variables}
        written = [written_out(side, values, Context()) for side in sides]
        return all_equal(written[0], written[1], self.timeout_ms) == Proved()

    def _solver(self, encoding: Encoding) -> Any:
        solver = z3.SimpleSolver()
        solver.set("timeout", self.timeout_ms)
        solver.set("rlimit", STEPS)
        solver.set("mbqi", False)
        solver.set("auto_config", False)
        for axiom in self.axioms:
            solver.add(self._formula(axiom))
        for function in self.functions.values():
            solver.add(self._size_formula(function))
        solver.add(encoding.conditions + encoding.sizes)
        for term, rank in encoding.ranks.items():
            solver.add([size(encoding.term(term), axis) >= 1 for axis in range(rank)])
        return solver

    def _formula(self, axiom: Axiom) -> Any:
        found = self._formulas.get(id(axiom))
        if found is None:
            found = self._formulas[id(axiom)] = (axiom, formula(axiom, self.functions))
        return found[1]

    def _size_formula(self, function: Function) -> Any:
        found = self._formulas.get(function.key)
        if found is None:
            args = [z3.Const(f"arg{i}", TENSOR) for i in range(len(function.samples))]
            cut = z3.Int("cut")
            given = [cut, *args] if function.word in CUTS else args
            result = function.symbol(*given)
            measures = [size(result, axis) == n for axis, n in enumerate(function.sizes(args, cut))]
            body = z3.And(*measures)
            found = z3.ForAll(given, body, patterns=[result]) if measures else z3.BoolVal(True)
            self._formulas[function.key] = found
        return found


def formula(axiom: Axiom, functions: Mapping[Any, Function]) -> Any:
    """An axiom in Z3: for all tensors and cuts, if sizes allow both sides, they are equal."""
    encoding = AxiomEncoding(functions, axiom)
    for name, shape in axiom.domain.items():
        encoding.declare(name, len(shape))
    left, right = encoding.term(axiom.left), encoding.term(axiom.right)
    bound = [*encoding.variables.values(), *encoding.cuts.values()]
    guards = [*encoding.conditions, *_matching_cuts(encoding, axiom, left, right)]
    equal = left == right
    body = z3.Implies(z3.And(*guards), equal) if guards else equal
    triggers = [side for side in (left, right) if _mentions_all(side, bound)]
    return z3.ForAll(bound, body, patterns=triggers) if triggers else z3.ForAll(bound, body)


def _matching_cuts(encoding: Encoding, axiom: Axiom, left: Any, right: Any) -> Iterator[Any]:
    """What makes both sides agree in shape. Sizes of inner terms are written out, so that a guard is about
    the sizes of variables and needs no axiom to be decided."""
    known = {str(equation.arg(0)): equation.arg(1) for equation in encoding.sizes}

    def measure(tensor: Any, axis: int) -> Any:
        expression = size(tensor, axis)
        found = known.get(str(expression))
        return expression if found is None else found

    for axis in range(encoding.ranks[axiom.left]):
        one, two = measure(left, axis), measure(right, axis)
        if not z3.eq(one, two):
            yield one == two


def _mentions_all(term: Any, bound: Iterable[Any]) -> bool:
    found: set[int] = set()
    rest = [term]
    while rest:
        node = rest.pop()
        found.add(node.get_id())
        rest.extend(node.children())
    return z3.is_app(term) and term.num_args() > 0 and all(known.get_id() in found for known in bound)


def _why(said: str) -> str:
    """Z3's reason to give up, in words."""
    if "resource" in said or "memory" in said:
        return "Z3 gave up after as many steps as it may take"
    if "timeout" in said or "cancel" in said:
        return "Z3 gave up after the time it may take; --timeout gives it more"
    return "the axioms do not imply it, as far as Z3 can tell"


def symbolic_layouts(rule: Rule) -> list[dict[Term, Layout]] | Objection:
    """The layouts of all subterms with `k` for the degree, for each choice of what `[*]` stands for."""
    found = settings(rule)
    if isinstance(found, Objection):
        return found
    every = []
    for setting in found:
        layouts = _layouts_at(rule, setting)
        if isinstance(layouts, Objection):
            return layouts
        every.append(layouts)
    return every


def _layouts_at(rule: Rule, setting: Setting) -> dict[Term, Layout] | Objection:
    shapes, concrete = setting
    context = Context(degree=Symbolic(("k",)), cuts=concrete.cuts, attrs=concrete.attrs)
    variables = {name: Typed(shapes[name], layout) for name, layout in rule.variables.items()}
    types = types_of(rule.left + rule.right, variables, context)
    if isinstance(types, Objection):
        return types
    return {term: kind.layout for term, kind in types.items()}


def _same_layout(one: Layout, two: Layout) -> Iterator[Any]:
    pairs = [
        *zip(one.degrees, two.degrees, strict=True),
        *zip(one.pieces, two.pieces, strict=True),
        (one.partials, two.partials),
        (one.copies, two.copies),
    ]
    for a, b in pairs:
        yield as_z3(z3, a) == as_z3(z3, b)

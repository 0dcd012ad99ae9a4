"""Equal graphs: how they are found and proved, and how a graph is rewritten by them (Unity 3, 4).

layout, degree, linearity, pcg      how values lie over devices, and parallel computation graphs
term, words, canonical, rulebook    rules, as data and as text
families, compiling, enumerating, generate, emitting        finding rules
elements, functions, axioms, proving, executing, checking, verifying, census    judging them
costing, matching, applying         using them
"""

from soapstone.subst.applying import Rewritten, rewrite, rewrites
from soapstone.subst.layout import Layout
from soapstone.subst.pcg import Pcg, pcg, without_parallel_nodes
from soapstone.subst.rulebook import Book, shipped
from soapstone.subst.term import Rule, parse_rule

__all__ = [
    "Book",
    "Layout",
    "Pcg",
    "Rewritten",
    "Rule",
    "parse_rule",
    "pcg",
    "rewrite",
    "rewrites",
    "shipped",
    "without_parallel_nodes",
]

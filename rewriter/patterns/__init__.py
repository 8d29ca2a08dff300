"""Patterns, the matcher, rules, and their application to a graph.

pattern.py  patterns as values
match.py    the matcher: from an anchor to its matches, or to the deepest reason for a miss
bindings.py what a match knows, and the deepest failure
rule.py     rule, policy, refusal, builder, examples
rewrite.py  one rule applied to every candidate site, with purity and contract checked
"""

from k3rewrite.patterns.bindings import Attempt, Match, Unlike, describe
from k3rewrite.patterns.pattern import (
    LAST_DIM,
    OPERATORS,
    Anything,
    Cast,
    Dims,
    Item,
    ListOf,
    Named,
    Number,
    Pattern,
    Product,
    Var,
    Views,
    call,
)
from k3rewrite.patterns.rule import Builder, CounterExample, Example, Policy, Refusal, Rule

__all__ = [
    "LAST_DIM",
    "OPERATORS",
    "Anything",
    "Attempt",
    "Builder",
    "Cast",
    "CounterExample",
    "Dims",
    "Example",
    "Item",
    "ListOf",
    "Match",
    "Named",
    "Number",
    "Pattern",
    "Policy",
    "Product",
    "Refusal",
    "Rule",
    "Unlike",
    "Var",
    "Views",
    "call",
    "describe",
]

"""Reading a piece of graph in index notation, for `lift_moe`.

index.py       integers: which element of which tensor (positions, sorted orders, ids)
expression.py  values: elements, casts, products, sums, and element-wise operators over them
layout.py      dimensions as positions: views, broadcasting, common refinements
reader.py      graph nodes -> values, by the tables of the next four
views.py       views, slices, casts
operations.py  elements by index, element-wise operators, sums, products
routing.py     the integer side of a mixture: orders, counts, offsets, groups
shares.py      masks, one-hot and scattered weights, accumulation at an index
experts.py     a value -> the arguments of `k3::experts`, or the reason why it is none
routes.py      the same for the output of one route
activation.py  SiLU or SiTU of two halves
weights.py     stacked weights: dense or MXFP4, which rows of which tensor
ranges.py      which numbers ids may be: none below zero? by intervals.py and range_rules.py
tables.py      MXFP4's lookup tables; values for a check by execution
sites.py       where in the graph a mixture may be
examples.py    examples and counterexamples of the rule
"""

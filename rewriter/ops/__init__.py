"""Ops and their kernels: what an op means, what implements it, how a kernel is bound to a graph and run in place.

`vocabulary.py` is the meaning (schema, reference, fake, cost), `kernel.py` the implementation for targets, `binding.py`
gives a chosen pair a name of its own for the dispatcher, `inplace_variant.py` makes the form that writes its inputs,
`runs.py` sees which of kernel and reference really ran.
"""

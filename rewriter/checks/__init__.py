"""Checks of rewritten graphs.

contract.py    after every pass: metadata of inputs and outputs, well-formedness, allowed ops, order of collectives
regions.py     per site: old nodes against new nodes, both against an fp64 run of the old
end_to_end.py  the compiled model against eager, both against an fp64 run
precise.py     the fp64 run, with expert choices recorded in one run and forced in another
choices.py     whether a choice of experts is one, and how far below the best ones it lies
errors.py      the error measure and the acceptance rule of regions and end to end
"""

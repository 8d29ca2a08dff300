"""A pipeline: what its YAML files say, and running its passes over a graph.

settings.py     a pipeline as values; the one place where its settings are declared
config.py       finding and loading a pipeline
layer.py        one YAML file, read and checked on its own
merge.py        a file and its parents merged into one pipeline
expressions.py  the small language of `expect` and `when`
pass_base.py    what a pass is
runner.py       each pass in order, the contract after each, a report of each
"""

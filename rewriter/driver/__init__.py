"""One compilation from the outside: what is asked for, of which model, on which rank, and what comes of it.

request.py      flags and options become a request
choices.py      settings with a few values, the same for flags and for the backend's options
names.py        the names that a pipeline's conditions may use
kimi_k3.py      the model that the command line knows by name
factory.py      the user's model
ranks.py        the process group of a request
compilation.py  the stages on a captured graph
first_call.py   which kernels ran in the first call of the result
cache_key.py    what a compiled graph depends on beside the graph
run.py          all of it, for the command line
"""

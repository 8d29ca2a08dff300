"""One compilation from the outside: what is asked for, of which model, on which rank, and what comes of it.

`request.py` turns flags and options into a request, `factory.py` builds the model of a request, `ranks.py` its process
group, `compilation.py` runs the stages on a captured graph, `run.py` does all of it for the command line.
"""

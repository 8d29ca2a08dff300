"""What every stage asks of an FX graph: where a node came from, what it costs, what it writes.

provenance.py  source line, module path, inheritance of metadata
cost.py        launches and bytes of a node
arguments.py   a call's arguments by name, with the schema's defaults filled in
purity.py      writes and aliases, proved from schemas
storage.py     which nodes share storage
"""

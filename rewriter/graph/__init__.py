"""What every stage asks of an FX graph: where a node came from, what it costs, what it writes.

provenance.py  source line, module path, inheritance of metadata
cost.py        launches and bytes of a node
arguments.py   a call's arguments by name, with the schema's defaults filled in
shapes.py      metadata compared without a guard
layout.py      which views keep the elements and their order
dtypes.py      which dtypes hold which others without loss
effects.py     what one node writes, aliases and does besides, read off its schema
purity.py      what may be deleted, merged or moved
storage.py     which nodes share storage, who reads and writes it
"""

"""Plain data from outside: YAML that remembers its lines (`located.py`), dataclasses read from it with checks
(`typed.py`)."""

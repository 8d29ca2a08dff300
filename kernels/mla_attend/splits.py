"""In how many parts a row's history is read at once.

One workgroup reads a part of a row's keys for some of its queries (tiles.py). With one part a row a single request
would occupy one compute unit, whatever its length; with too many, partial results are more to write and to read than
what they save. So:

    parts = the fewest of 1 .. longest context / SHORTEST_PART whose workgroups fill the device's last round to at
            least FILLED of what the best number of parts would

Which keys are a part's follows from the length that the row has on the device: ceil(length / parts) of them, in whole
tiles. Parts of a short row behind its end are empty: they weigh nothing.
"""

from __future__ import annotations

SHORTEST_PART = 256
"""keys: below that partial results are more than a tenth of what is read"""
MOST_PARTS = 256
FILLED = 0.85


def parts_for(groups: int, context: int, compute_units: int) -> int:
    """`groups`: workgroups if each read a whole history; `context`: the longest that a row can have, in keys."""
    most = max(1, min(MOST_PARTS, -(-context // SHORTEST_PART)))
    if groups <= 0 or groups >= FILLED * compute_units:
        return 1

    def filled(parts: int) -> float:
        rounds = -(-groups * parts // compute_units)
        return groups * parts / (rounds * compute_units)

    best = max(filled(parts) for parts in range(1, most + 1))
    return next(parts for parts in range(1, most + 1) if filled(parts) >= FILLED * best)

"""From a model to a functional ATen graph.

capture.py  capture() -> Captured, and lowering of a Dynamo graph
dynamo.py   Dynamo's errors with the user's source line
"""

from k3rewrite.capture.capture import Captured, capture, lower, run_captured

__all__ = ["Captured", "capture", "lower", "run_captured"]

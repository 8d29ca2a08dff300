"""What every test starts from: no compiled code of the test before, no compiler cache of an earlier session."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest

# Read when Inductor is first imported; a cache of another version of this package must not answer for this one. The
# workers of pytest-xdist inherit the one of their session: headers are compiled once for all of them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="k3rewrite-inductor-")


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """The same random numbers for a test wherever it runs in the order, and its own compilations: Dynamo allows eight
    of one function and then gives up."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()

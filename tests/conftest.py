"""What every test starts from: no compiled code of the test before, no compiler cache of an earlier session."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest

# Read when Inductor is first imported; a cache of another version of this package must not answer for this one.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="k3rewrite-inductor-")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Dynamo allows eight compilations of one function and then gives up: every test gets its own eight."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()

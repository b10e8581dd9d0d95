"""What holds for all tests."""

from __future__ import annotations

import os

# Several test processes share the processors; the waiting threads of a BLAS would only spin against each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

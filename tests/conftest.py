"""What holds for all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# No test is timed: a busy machine takes as long as it takes.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Several test processes share the processors; the waiting threads of a BLAS would only spin against each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Started in the background by a shell this process ignores interrupts, and under nohup the end of its terminal, and so
# would those that tests interrupt.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

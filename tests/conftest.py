"""What all tests share."""

from __future__ import annotations

import signal

import hypothesis

# A busy machine is not a failure: pytest's own time limit catches what hangs.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# A shell without job control starts what stands before ``&`` with Ctrl-C ignored, and every process
# of a test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

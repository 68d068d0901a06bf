"""Time on an emulated accelerator."""

from __future__ import annotations

import time


class Device:
    """Sleeps for as long as an accelerator would compute.

    ``sleep`` always oversleeps a little. An accelerator does not, so what one layer took too long
    is taken off the next: the sum is right to within one layer. The host's own work between
    layers is *not* taken off; it counts in full, as on a device that waits for its host.
    """

    def __init__(self) -> None:
        self._debt = 0.0

    def compute(self, seconds: float) -> None:
        """Let ``seconds`` of compute pass."""
        wanted = seconds - self._debt
        if wanted <= 0:
            self._debt = -wanted
            return
        begin = time.perf_counter()
        time.sleep(wanted)
        self._debt = time.perf_counter() - begin - wanted

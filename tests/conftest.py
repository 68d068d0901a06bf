"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# A busy machine is not a failure: pytest's own time limit catches what hangs.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# A shell without job control starts what stands before ``&`` with Ctrl-C ignored, and every process
# of a test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tuners remember comes neither from the user's cache nor goes there; built wheels do."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bytescheduler"
    ours = tmp_path_factory.mktemp("cache")
    (ours / "bytescheduler").mkdir()
    (ours / "bytescheduler" / "wheels").symlink_to(users / "wheels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(ours))
        yield

"""What all tests share."""

from __future__ import annotations

import hypothesis

# A busy machine is not a failure: pytest's own time limit catches what hangs.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

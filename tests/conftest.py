"""What all tests share."""

from __future__ import annotations

import hypothesis
import pytest

# A busy machine is not a failure: pytest's own time limit catches what hangs.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep together, where tests run side by side, what shares the processes that it starts."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        engine = callspec.params.get("engine") if callspec is not None else None
        name = f"{item.path.name} {getattr(engine, 'name', '')}"
        item.add_marker(pytest.mark.xdist_group(name))

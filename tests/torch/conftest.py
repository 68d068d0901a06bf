from __future__ import annotations

import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def three_ranks():
    pool = RankPool(3)
    yield pool
    pool.stop()

"""The contract suite: every check of ``contract.py`` over every engine of ``launchers.py``.

An engine is launched once for all its checks (starting processes is what takes time) and once for
each way of losing a rank.
"""

from __future__ import annotations

import re

import contract
import pytest
from launchers import ENGINES, Ended, Engine

CHECKS = [check.__name__ for check in contract.CHECKS]
IN_PROCESS = ("fake", "fake-alone")
NOT_RUN = "not run: an earlier check failed"


def engine_params(*, several_ranks: bool = False) -> list:
    return [
        pytest.param(
            engine,
            id=engine.name,
            marks=[] if engine.name in IN_PROCESS else [pytest.mark.multiprocess],
        )
        for engine in ENGINES
        if engine.world_size > 1 or not several_ranks
    ]


@pytest.fixture(scope="session")
def outcomes() -> dict[str, Ended]:
    """Launches that were made already, by engine."""
    return {}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("engine", engine_params())
@pytest.mark.timeout(300)
def test_contract(engine: Engine, check: str, outcomes, tmp_path_factory) -> None:
    engine.skip_unless_available()
    if engine.name not in outcomes:
        outcomes[engine.name] = engine.run(tmp_path_factory.mktemp(engine.name))
    ended = outcomes[engine.name]
    assert sorted(ended.reports) == list(range(engine.world_size)), ended.output[-4000:]
    for rank, report in ended.reports.items():
        verdict = report.get(check, NOT_RUN)
        assert verdict == "ok", f"rank {rank}: {verdict}\n{ended.output[-4000:]}"


def survivors(engine: Engine, victim: int, ended: Ended) -> list[str]:
    return [next(iter(report.values())) for rank, report in ended.reports.items() if rank != victim]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("engine", engine_params(several_ranks=True))
def test_a_rank_that_leaves_fails_the_others_with_a_transport_error(engine, victim, tmp_path):
    engine.skip_unless_available()
    if not engine.notices_leaving:
        pytest.skip(f"{engine.name} cannot tell that a rank has left; docs/transports.md says so")
    ended = engine.run(tmp_path, "peer_leaves", str(victim), limit=60)
    told = survivors(engine, victim, ended)
    assert len(told) == engine.world_size - 1, ended.output[-4000:]
    for words in told:
        seconds, error = re.fullmatch(r"([\d.]+) s, (\w+Error: .+)", words, re.DOTALL).groups()
        assert float(seconds) < 15  # 10 of them are its own close, which waits for rank 0
        assert error


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "engine", [param for param in engine_params(several_ranks=True) if param.marks]
)
def test_a_rank_that_is_killed_ends_all_others_within_10_seconds(engine, victim, tmp_path):
    engine.skip_unless_available()
    ended = engine.run(tmp_path, "peer_is_killed", str(victim), limit=60)
    killed = float(ended.reports[victim]["peer_is_killed"].removeprefix("killed at "))
    assert ended.at - killed < 10, ended.output[-4000:]
    assert ended.code != 0
    told = survivors(engine, victim, ended)
    if engine.launcher_ends_job:
        assert re.search(rf"rank {victim}\b|process|exit", ended.output), ended.output[-4000:]
        return
    assert len(told) == engine.world_size - 1, ended.output[-4000:]
    for words in told:
        match = re.fullmatch(r"([\d.]+) s, (\w+Error): (.+)", words, re.DOTALL)
        assert match, words
        assert float(match[1]) < 10
        assert re.search(r"\brank \d", match[3]), "our words say who reports or who is gone"

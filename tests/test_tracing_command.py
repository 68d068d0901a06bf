"""``bytescheduler trace`` over timelines that are made up, and over one of a real exchange."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescheduler.cli import main
from bytescheduler.core.config import Settings
from bytescheduler.core.exchange import Exchange
from bytescheduler.core.plan import Layout, ParameterSpec
from bytescheduler.core.trace import TraceRecorder
from bytescheduler.tracing import aligned, check, explain, load, summarise
from bytescheduler.transports.fake import FakeNetwork, FakeTransport

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

PARAMETERS = ("embedding", "body", "head")


def span(
    lane: str, name: str, begin: float, end: float, chunk: int | None = None
) -> dict[str, Any]:
    """A span; milliseconds in, the format's microseconds out."""
    args = {} if chunk is None else {"chunk": chunk, "bytes": 1_000_000}
    times = {"ts": begin * 1e3, "dur": (end - begin) * 1e3}
    return {"ph": "X", "pid": 0, "tid": lane, "name": name, "args": args, **times}


def iteration(
    start: float, *, waits: Sequence[tuple[float, float]], sends: Sequence[tuple[float, float]]
) -> list[dict[str, Any]]:
    """100 ms: gates first, gradients at 60, 80 and 100 ms."""
    posted = [
        {"ph": "i", "tid": "gradients", "name": name, "ts": (start + when) * 1e3}
        for name, when in zip(reversed(PARAMETERS), (60, 80, 100), strict=True)
    ]
    gates = [span("wait", "embedding", start + begin, start + end) for begin, end in waits]
    chunks = [
        span("network", "embedding", start + begin, start + end, chunk)
        for chunk, (begin, end) in enumerate(sends)
    ]
    return [*gates, *chunks, *posted]


def write(
    path: Path,
    *,
    rank: int = 0,
    world_size: int = 2,
    waits: Sequence[tuple[float, float]] = (),
    sends: Sequence[tuple[float, float]] = ((0, 10),),
    clock_ms: float = 0.0,
    parameters: Sequence[str] = PARAMETERS,
    negotiated: bool = False,
) -> Path:
    events = [
        event
        for number in range(4)
        for event in iteration(100.0 * number + clock_ms, waits=waits, sends=sends)
    ]
    plan = {
        "partition_size": 1 << 20,
        "order": list(parameters),
        "negotiated": negotiated,
        "bytes": dict.fromkeys(parameters, 1_000_000),
    }
    metadata = {"rank": rank, "world_size": world_size, "plan": plan}
    path.write_text(json.dumps({"traceEvents": events, "metadata": metadata}))
    return path


def words(*paths: Path) -> str:
    summaries = [summarise(timeline) for timeline in aligned([load(path) for path in paths])]
    return " ".join(explain([item for item in summaries if item is not None]))


def test_shares_are_those_of_the_recorded_spans(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", waits=[(10, 30)], sends=[(0, 20), (5, 25)])
    summary = summarise(load(path))
    assert summary is not None
    assert summary.iterations == 3
    assert summary.seconds == pytest.approx(0.1)
    assert summary.wait == pytest.approx(0.20)
    assert summary.compute == pytest.approx(0.80)
    assert summary.network == pytest.approx(0.25)
    assert summary.bubble == pytest.approx(0.05)
    assert summary.bandwidth == pytest.approx(2e6 / 0.025)


@pytest.mark.parametrize(
    ("waits", "sends", "expected"),
    [
        ([(0, 1)], [(0, 50)], "Computing limits"),
        ([(0, 40)], [(0, 99)], "network limits"),
        ([(0, 40)], [(0, 5)], "Latency limits"),
        ([(0, 40)], [(0, 60)], "Order limits"),
    ],
)
def test_says_what_limits_the_job(
    tmp_path: Path,
    waits: list[tuple[float, float]],
    sends: list[tuple[float, float]],
    expected: str,
) -> None:
    assert expected in words(write(tmp_path / "a.json", waits=waits, sends=sends))


def test_names_the_slow_rank(tmp_path: Path) -> None:
    quick = write(tmp_path / "0.json", rank=0, waits=[(0, 40)], sends=[(0, 60)])
    slow = write(tmp_path / "1.json", rank=1, waits=[(0, 5)], sends=[(0, 60)])
    assert "Rank 1 is slower" in words(quick, slow)


def test_clocks_are_brought_together(tmp_path: Path) -> None:
    first = load(write(tmp_path / "0.json", rank=0))
    second = load(write(tmp_path / "1.json", rank=1, clock_ms=5000.0))
    moved = aligned([second, first])[1]
    assert moved.rank == 1
    assert moved.lane("network")[0].end == pytest.approx(first.lane("network")[0].end)


def test_a_different_order_of_chunks_is_a_problem(tmp_path: Path) -> None:
    first = load(write(tmp_path / "0.json", rank=0, sends=[(0, 10), (10, 20)]))
    second = load(write(tmp_path / "1.json", rank=1, sends=[(10, 20), (0, 10)]))
    assert "different chunks as number 0: 0 and 1" in check([first, second])[0]


def test_a_missing_rank_is_a_problem_and_shows_in_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "0.json", rank=0, world_size=3)
    assert main(["trace", str(path), "--output", str(tmp_path / "p.png")]) == 1
    assert "missing: 1, 2" in capsys.readouterr().out


def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good.json")
    other = write(tmp_path / "other.json", rank=1, parameters=("embedding", "body"))
    text = tmp_path / "text.json"
    text.write_text("{}")
    picture = tmp_path / "p.png"
    for files, message in (
        ([tmp_path / "none.json"], "cannot read"),
        ([text], "no timeline"),
        ([good, good], "rank 0 twice"),
        ([good, other], "models or world"),
    ):
        assert main(["trace", *map(str, files), "--output", str(picture)]) == 2
        assert message in capsys.readouterr().err
    assert main(["trace", str(good), "--output", str(good)]) == 2
    assert not picture.exists()


def test_a_timeline_without_a_whole_iteration_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "0.json", world_size=1)
    document = json.loads(path.read_text())
    document["traceEvents"] = document["traceEvents"][:4]
    path.write_text(json.dumps(document))
    assert main(["trace", str(path), "--output", str(tmp_path / "p.png")]) == 2
    assert "whole iteration" in capsys.readouterr().err


def train(transport: FakeTransport, recorder: TraceRecorder, steps: int) -> None:
    layout = Layout([ParameterSpec(name=name, numel=1000, itemsize=4) for name in PARAMETERS])
    buffers = {name: np.zeros(size, np.float32) for name, size in layout.sizes.items()}
    settings = Settings(partition_size=1 << 10, credit_size=1 << 12)
    exchange = Exchange(layout, buffers, transport, settings, recorder)
    for _ in range(steps):
        for parameter in reversed(range(len(PARAMETERS))):
            exchange.post(parameter)
        exchange.step()
        exchange.wait(range(len(PARAMETERS)))
    exchange.close()


def test_where_the_engine_negotiates_chunks_move_from_when_rank_0_starts_them(
    tmp_path: Path,
) -> None:
    leader = write(tmp_path / "0.json", sends=[(40, 50), (10, 30)], negotiated=True)
    other = write(
        tmp_path / "1.json", rank=1, sends=[(0, 50), (20, 30)], negotiated=True, clock_ms=7000
    )
    timelines = aligned([load(other), load(leader)])
    assert check(timelines) == []
    begins = [[round(s.begin * 1e3) for s in t.lane("network")[:2]] for t in timelines]
    assert begins == [[10, 40], [20, 40]]


@pytest.mark.parametrize("negotiates", [False, True])
def test_timelines_of_a_real_exchange_are_merged_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], negotiates: bool
) -> None:
    recorders = [TraceRecorder(tmp_path / "t.json", rank, 2) for rank in range(2)]
    ends = FakeNetwork(2, negotiates=negotiates).transports()
    threads = [
        threading.Thread(target=train, args=(transport, recorder, 5))
        for transport, recorder in zip(ends, recorders, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    files = [str(recorder.write()) for recorder in recorders]
    picture, merged = tmp_path / "p.png", tmp_path / "p.merged.json"
    assert main(["trace", *files, "--output", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "limits the job" in said
    assert "Problem" not in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    pids = {event["pid"] for event in json.loads(merged.read_text())["traceEvents"]}
    assert pids == {0, 1}

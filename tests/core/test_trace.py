"""The recorder: a valid Chrome trace whose events say what happened."""

from __future__ import annotations

import json
import threading
import time

import pytest

from bytescheduler.core.plan import Layout, ParameterSpec
from bytescheduler.core.trace import TraceRecorder

LAYOUT = Layout(
    [
        ParameterSpec(name="embedding", numel=40, itemsize=4),
        ParameterSpec(name="head", numel=4, itemsize=4),
    ],
    [1, 0],
)


def record(path, rank=0, world_size=1):
    recorder = TraceRecorder(path, rank, world_size)
    recorder.planned(LAYOUT, LAYOUT.cut(96))
    return recorder


def events(recorder, phase):
    document = json.loads(recorder.write().read_text())
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_a_chunk_becomes_a_complete_event_with_its_bytes(tmp_path):
    recorder = record(tmp_path / "t.json", rank=1, world_size=2)
    chunk = LAYOUT.cut(96).chunks[0]
    before = time.time() * 1e6
    recorder.started(chunk)
    recorder.completed(chunk)
    (event,) = events(recorder, "X")
    assert event["pid"] == 1
    assert event["tid"] == "network"
    assert event["args"] == {"chunk": 0, "bytes": chunk.nbytes}
    assert event["name"] == "head … embedding"
    assert event["dur"] >= 0
    assert abs(event["ts"] - before) < 60e6


def test_a_completion_without_a_start_is_left_out(tmp_path):
    recorder = record(tmp_path / "t.json")
    recorder.completed(LAYOUT.cut(96).chunks[0])
    assert events(recorder, "X") == []


def test_gradients_are_instants_named_by_parameter(tmp_path):
    recorder = record(tmp_path / "t.json")
    recorder.posted(1)
    (event,) = events(recorder, "i")
    assert event["name"] == "head"


@pytest.mark.parametrize("lane", ["compute", "wait", "update"])
def test_spans_keep_lane_and_duration(tmp_path, lane):
    recorder = record(tmp_path / "t.json")
    begin = time.perf_counter()
    recorder.span(lane, "forward", begin, begin + 0.25)
    (event,) = events(recorder, "X")
    assert event["tid"] == lane
    assert event["dur"] == pytest.approx(250_000)


def test_the_plan_is_in_the_metadata(tmp_path):
    document = json.loads(record(tmp_path / "t.json").write().read_text())
    assert document["metadata"]["plan"] == {
        "partition_size": 96,
        "order": ["head", "embedding"],
        "negotiated": False,
        "bytes": {"embedding": 160, "head": 16},
    }
    (process,) = [event for event in document["traceEvents"] if event["ph"] == "M"]
    assert process["args"] == {"name": "rank 0"}


@pytest.mark.parametrize(
    ("path", "world_size", "name"),
    [
        ("t.json", 1, "t.json"),
        ("t.json", 4, "t.rank2.json"),
        ("t-{rank}.json", 4, "t-2.json"),
        ("t", 4, "t.rank2.json"),
    ],
)
def test_each_rank_writes_its_own_file(tmp_path, path, world_size, name):
    recorder = record(tmp_path / "deep" / path, rank=2, world_size=world_size)
    assert recorder.write() == tmp_path / "deep" / name
    assert [item.name for item in (tmp_path / "deep").iterdir()] == [name]


def test_writing_while_other_threads_record(tmp_path):
    recorder = record(tmp_path / "t.json")
    threads = [
        threading.Thread(target=lambda: [recorder.posted(0) for _ in range(500)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recorder.write()
    assert len(events(recorder, "i")) == 1500

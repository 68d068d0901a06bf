"""A profile from a recorded timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.simulate import Network, Schedule, load_trace, simulate, write_timeline

LAYERS = (("a", 0.1, 400), ("b", 0.2, 800), ("c", 0.3, 40))  # name, forward seconds, bytes
WAIT_S, UPDATE_S = 0.5, 0.06


def _recorded(iterations: int) -> dict[str, Any]:
    """What the recorder writes for layers whose backward takes twice their forward."""
    events: list[dict[str, Any]] = []
    now = 100.0
    for _ in range(iterations):
        for lane, seconds in (("wait", WAIT_S), ("update", UPDATE_S)):
            events.append(
                {"ph": "X", "tid": lane, "name": "a.weight", "ts": now * 1e6, "dur": seconds * 1e6}
            )
            now += seconds
        now += sum(forward for _, forward, _ in LAYERS)
        for name, forward, _ in reversed(LAYERS):
            now += 2 * forward
            events += [
                {"ph": "i", "tid": "gradients", "name": f"{name}.{kind}", "ts": now * 1e6}
                for kind in ("weight", "bias")
            ]
    sizes = {f"{name}.{kind}": size for name, _, size in LAYERS for kind in ("weight", "bias")}
    return {"traceEvents": events, "metadata": {"plan": {"order": list(sizes), "bytes": sizes}}}


def test_layers_times_and_sizes_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(_recorded(5)))
    profile = load_trace(path)
    assert [layer.name for layer in profile.layers] == ["a", "b", "c"]
    assert [layer.gradient_bytes for layer in profile.layers] == [800, 1600, 80]
    assert [layer.forward_s for layer in profile.layers] == pytest.approx([0.1, 0.2, 0.3], rel=0.01)
    assert [layer.backward_s for layer in profile.layers] == pytest.approx(
        [0.2, 0.4, 0.6], rel=0.01
    )
    assert sum(layer.update_s for layer in profile.layers) == pytest.approx(UPDATE_S)


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps(_recorded(1))])
def test_what_is_no_timeline_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"timeline|iterations"):
        load_trace(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_trace(tmp_path / "nothing.json")


def test_a_simulated_timeline_is_written_for_perfetto(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(_recorded(3)))
    result = simulate(load_trace(path), Network(workers=2, bandwidth=1e4), Schedule())
    out = tmp_path / "simulated.json"
    write_timeline(result.timeline, out)
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {"compute", "network"}

"""The simulator against results that can be worked out by hand, and its laws as properties."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.simulate import (
    POLICIES,
    Layer,
    Network,
    Profile,
    Schedule,
    best_schedule,
    bound_s,
    load_profile,
    simulate,
)

MB = 1_000_000


def _profile(*layers: tuple[float, float, int]) -> Profile:
    return Profile(
        name="test",
        layers=tuple(
            Layer(name=str(i), forward_s=f, backward_s=b, gradient_bytes=n)
            for i, (f, b, n) in enumerate(layers)
        ),
    )


def _network(**changes: object) -> Network:
    """Two workers at 1 MB/s: a byte costs a microsecond of all-reduce."""
    return Network(**{"workers": 2, "bandwidth": MB, **changes})  # type: ignore[arg-type]


EQUAL = _profile((1.0, 2.0, 3 * MB), (1.0, 2.0, 3 * MB))


def test_barrier_costs_forward_plus_what_backward_did_not_hide() -> None:
    # Layer 1's exchange runs from 2 to 5, layer 0's from 5 to 8, then both forwards.
    result = simulate(EQUAL, _network(), Schedule(policy="barrier", bucket_bytes=1))
    assert result.iteration_s == pytest.approx(10.0)


def test_priority_lets_the_first_layer_pass() -> None:
    # Layer 1 sends from 2 to 4, layer 0 from 4 to 7; its forward hides layer 1's rest, 7 to 8.
    schedule = Schedule(policy="priority", partition_bytes=1000, credit_bytes=1000)
    assert simulate(EQUAL, _network(), schedule).iteration_s == pytest.approx(9.0, rel=1e-3)
    assert bound_s(EQUAL, _network()) == pytest.approx(9.0)


def test_fifo_without_barrier_frees_only_the_layers_that_were_sent_first() -> None:
    # In this order layer 0 is the last to arrive (at 8): nothing is gained.
    schedule = Schedule(policy="fifo", partition_bytes=1000, credit_bytes=1000)
    assert simulate(EQUAL, _network(), schedule).iteration_s == pytest.approx(10.0, rel=1e-3)


def test_dear_hides_gathers_behind_forward() -> None:
    # Reduce-scatters end at 5.5, layer 0 is gathered at 7, layer 1 at 8.5 and computes until 9.5.
    schedule = Schedule(policy="dear", partition_bytes=1000, credit_bytes=1000)
    assert simulate(EQUAL, _network(), schedule).iteration_s == pytest.approx(9.5, rel=1e-3)


def test_the_wire_is_clear_when_the_urgent_layer_is_ready() -> None:
    chunk = MB // 10
    small = Schedule(partition_bytes=chunk, credit_bytes=chunk)
    large = Schedule(partition_bytes=chunk, credit_bytes=30 * chunk)
    fast = simulate(EQUAL, _network(), small).iteration_s
    assert simulate(EQUAL, _network(), large).iteration_s == pytest.approx(fast, rel=0.02)


def test_credit_hides_latency() -> None:
    network = _network(latency_s=0.05)
    one = Schedule(partition_bytes=MB // 10, credit_bytes=MB // 10)
    four = Schedule(partition_bytes=MB // 10, credit_bytes=4 * MB // 10)
    assert simulate(EQUAL, network, four).iteration_s < simulate(EQUAL, network, one).iteration_s


def test_announcements_and_overhead_count() -> None:
    schedule = Schedule(partition_bytes=MB // 10, credit_bytes=MB // 10)
    plain = simulate(EQUAL, _network(), schedule).iteration_s
    for cost in ({"announcement_s": 0.01}, {"overhead_s": 0.01}):
        assert simulate(EQUAL, _network(**cost), schedule).iteration_s > plain


def test_one_big_first_layer_cannot_be_hidden() -> None:
    profile = _profile((0.1, 0.2, 5 * MB), (1.0, 2.0, 0))
    assert bound_s(profile, _network()) == pytest.approx(3.3 + 5.0)


def test_push_and_pull_pass_each_other() -> None:
    network = _network(collective="ps", bandwidth=2 * MB)
    schedule = Schedule(partition_bytes=1000, credit_bytes=10_000)
    profile = _profile((0.0, 0.0, 4 * MB))
    assert simulate(profile, network, schedule).iteration_s == pytest.approx(2.0, rel=1e-2)


def test_few_servers_are_the_bottleneck() -> None:
    assert Network(workers=8, bandwidth=MB, collective="ps", servers=2).exchange_s(MB) == 4.0


def test_costs_of_collectives() -> None:
    ring = Network(workers=4, bandwidth=MB, latency_s=1.0)
    tree = Network(workers=1024, bandwidth=MB, latency_s=1.0, collective="tree")
    assert ring.exchange_s(MB) == pytest.approx(1.5)
    assert (ring.alpha_s, tree.alpha_s) == (6.0, 20.0)


def test_a_single_worker_exchanges_nothing() -> None:
    network = Network(workers=1, bandwidth=MB)
    assert simulate(EQUAL, network, Schedule()).iteration_s == pytest.approx(EQUAL.compute_s)


def test_timeline_is_the_iteration() -> None:
    result = simulate(EQUAL, _network(), Schedule())
    assert max(span.end_s for span in result.timeline) == pytest.approx(result.iteration_s)
    names = [span.name for span in result.timeline if span.track == "compute"]
    assert names == ["backward 1", "backward 0", "forward 0", "forward 1"]


@pytest.mark.parametrize(("name", "gain"), [("vgg16", 1.33), ("resnet50", 1.33)])
def test_published_models_gain_what_design_says(name: str, gain: float) -> None:
    profile = load_profile(name, compute_s=1.0)
    network = Network(workers=2, bandwidth=profile.gradient_bytes)
    ddp = best_schedule(profile, network, "barrier", buckets=True)[1]
    assert ddp.iteration_s / ddp.bound_s == pytest.approx(gain, abs=0.02)


LAYERS = st.lists(
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 2 * MB)), min_size=1, max_size=8
)


@given(layers=LAYERS, policy=st.sampled_from(POLICIES), chunks=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_nothing_beats_the_bound(
    layers: list[tuple[float, float, int]], policy: str, chunks: int
) -> None:
    profile = _profile(*layers)
    size = max(1, profile.gradient_bytes // chunks)
    schedule = Schedule(policy=policy, partition_bytes=size, credit_bytes=size)  # type: ignore[arg-type]
    result = simulate(profile, _network(), schedule)
    assert result.iteration_s >= result.bound_s - 1e-6
    assert result.bound_s >= result.limit_s - 1e-6
    assert result.iteration_s <= result.compute_s + result.exchange_s + 1e-6


@given(layers=LAYERS)
@settings(max_examples=50, deadline=None)
def test_small_chunks_reach_the_bound(layers: list[tuple[float, float, int]]) -> None:
    profile = _profile(*layers)
    size = max(1, profile.gradient_bytes // 500)
    schedule = Schedule(partition_bytes=size, credit_bytes=size)
    result = simulate(profile, _network(), schedule)
    slack = (len(layers) + 2) * _network().exchange_s(size) + 1e-6
    assert result.iteration_s <= result.bound_s + slack


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule(partition_bytes=0),
        lambda: Schedule(partition_bytes=8, credit_bytes=4),
        lambda: Schedule(policy="lifo"),  # type: ignore[arg-type]
        lambda: Schedule(policy="priority", bucket_bytes=4),
        lambda: Network(workers=0, bandwidth=1.0),
        lambda: Network(workers=2, bandwidth=0.0),
        lambda: Network(workers=2, bandwidth=1.0, latency_s=-1.0),
        lambda: Profile(name="empty", layers=()),
        lambda: _profile((-1.0, 0.0, 0)),
        lambda: load_profile("alexnet"),
    ],
)
def test_bad_input_is_refused(make: object) -> None:
    with pytest.raises(ConfigurationError, match=r"got|named"):
        make()  # type: ignore[operator]

"""Convergence and speed models against synthetic jobs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bytescheduler.cluster.models import (
    ConvergenceTracker,
    Measurement,
    SpeedModel,
    SpeedTracker,
    find_stragglers,
    fit_convergence,
    fit_speed,
    replace_outliers,
)
from bytescheduler.exceptions import ConfigurationError

TRUTHS = {
    "sync": SpeedModel(mode="sync", coefficients=(1.02, 2.78, 4.92, 0.0, 0.02), batch=64),
    "async": SpeedModel(mode="async", coefficients=(2.83, 3.92, 0.0, 0.11)),
    "allreduce": SpeedModel(
        mode="allreduce", coefficients=(0.01, 0.05, 0.2, 0.3, 0.002), batch=256
    ),
}


def configurations(mode: str) -> list[tuple[int, int, int]]:
    """780 pairs of up to 39 workers and 20 servers, or workers and nodes of 4 GPUs."""
    if mode == "allreduce":
        return [(w, 0, n) for w in range(1, 65) for n in range(-(-w // 4), min(w, 16) + 1)]
    return [(w, p, 0) for w in range(1, 40) for p in range(1, 21)]


@pytest.mark.parametrize("mode", TRUTHS)
@pytest.mark.parametrize("seed", range(5))
def test_ten_noisy_measurements_predict_speed_within_ten_percent(mode, seed):
    truth, rng = TRUTHS[mode], np.random.default_rng(seed)
    choices = configurations(mode)
    chosen = [choices[i] for i in rng.choice(len(choices), 10, replace=False)]
    samples = [
        Measurement(w, p, truth.step_time(w, p, n) * (1 + 0.02 * rng.standard_normal()), n)
        for w, p, n in chosen
    ]
    fit = fit_speed(truth.mode, samples, truth.batch)
    errors = [abs(fit.speed(*c) / truth.speed(*c) - 1) for c in choices]
    assert np.mean(errors) < 0.1


@pytest.mark.parametrize("mode", TRUTHS)
def test_coefficients_are_recovered_without_noise(mode):
    truth = TRUTHS[mode]
    choices = configurations(mode)[:: len(configurations(mode)) // 20]
    samples = [Measurement(w, p, truth.step_time(w, p, n), n) for w, p, n in choices]
    fit = fit_speed(truth.mode, samples, truth.batch)
    assert fit.coefficients == pytest.approx(truth.coefficients, rel=0.01, abs=1e-3)


def test_tracker_averages_equal_configurations_and_refits():
    tracker = SpeedTracker("async")
    for seconds in (0.9, 1.1):
        tracker.observe(Measurement(1, 1, seconds))
    assert tracker.model.step_time(1, 1) == pytest.approx(1.0)
    tracker.observe(Measurement(2, 1, 0.5))
    assert tracker.model.step_time(2, 1) == pytest.approx(0.5)
    tracker.observe(Measurement(4, 1, 1.0))
    assert tracker.model.step_time(4, 1) > 0.5


@pytest.mark.parametrize(
    ("mode", "measurement"),
    [
        ("sync", Measurement(2, 0, 1.0)),
        ("async", Measurement(0, 1, 1.0)),
        ("allreduce", Measurement(2, 0, 0.0)),
        ("allreduce", Measurement(2, 0, math.nan)),
    ],
)
def test_impossible_measurements_are_refused(mode, measurement):
    with pytest.raises(ConfigurationError):
        fit_speed(mode, [measurement])


def test_a_fit_needs_a_measurement():
    with pytest.raises(ConfigurationError, match="at least one"):
        fit_speed("sync", [])


def test_outliers_are_replaced_by_their_neighbours_mean():
    losses = [10, 9, 8, 70, 7, 6, 5.5, 0.1, 5, 4.8, 4.6, 4.5]
    cleaned = replace_outliers(losses)
    assert cleaned[3] == pytest.approx(7.5)
    assert cleaned[7] == pytest.approx(5.25)
    untouched = [i for i in range(len(losses)) if i not in (3, 7)]
    assert [cleaned[i] for i in untouched] == [losses[i] for i in untouched]


def test_curve_is_recovered_without_noise():
    steps = list(range(1, 200, 5))
    losses = [5 * (1 / (0.02 * k + 0.9) + 0.1) for k in steps]
    fit = fit_convergence(steps, losses)
    assert [fit.loss(k) for k in (1, 100, 1000)] == pytest.approx(
        [5 * (1 / (0.02 * k + 0.9) + 0.1) for k in (1, 100, 1000)], rel=0.01
    )


CURVES = {
    "the model's own": lambda e: 1 / (0.15 * e + 0.8) + 0.2,
    "shifted hyperbola": lambda e: 3 / (e + 4) + 0.3,
    "power law": lambda e: 2 * (e + 2) ** -0.8 + 0.25,
}


def convergence_epoch(curve, threshold: float, patience: int) -> int:
    """Return the true epoch by which ``patience`` epochs in a row fell short of the threshold."""
    small = 0
    for epoch in range(1, 100_000):
        decrease = (curve(epoch - 1) - curve(epoch)) / curve(0)
        small = small + 1 if decrease < threshold else 0
        if small == patience:
            return epoch
    raise AssertionError("never converges")


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("seed", range(4))
def test_steps_left_are_within_ten_percent_of_the_run_after_sixty_percent(name, seed):
    curve, threshold, per_epoch = CURVES[name], 0.002, 50
    end = convergence_epoch(curve, threshold, 3) * per_epoch
    rng = np.random.default_rng(seed)
    tracker = ConvergenceTracker(threshold=threshold, steps_per_epoch=per_epoch, patience=3)
    now = int(0.6 * end)
    for step in range(0, now + 1, 10):
        tracker.observe(step, curve(step / per_epoch) * (1 + 0.003 * rng.standard_normal()))
    assert abs(tracker.steps_left(now) - (end - now)) <= 0.1 * end


def test_steps_left_of_a_clean_hyperbola_are_within_ten_percent_of_what_is_left():
    curve, threshold, per_epoch = CURVES["shifted hyperbola"], 0.002, 50
    end = convergence_epoch(curve, threshold, 3) * per_epoch
    tracker = ConvergenceTracker(threshold=threshold, steps_per_epoch=per_epoch, patience=3)
    now = int(0.6 * end)
    for step in range(0, now + 1, 10):
        tracker.observe(step, curve(step / per_epoch))
    assert tracker.steps_left(now) == pytest.approx(end - now, rel=0.1)


def test_interval_holds_the_expectation_and_widens_with_noise():
    widths = []
    for noise in (0.002, 0.02):
        rng = np.random.default_rng(1)
        tracker = ConvergenceTracker(threshold=0.002, steps_per_epoch=50)
        for step in range(0, 1000, 20):
            clean = CURVES["shifted hyperbola"](step / 50)
            tracker.observe(step, clean * (1 + noise * rng.standard_normal()))
        left = tracker.interval(1000)
        assert left.low <= left.expected <= left.high
        widths.append(left.high - left.low)
    assert widths[0] < widths[1]


def test_a_learning_rate_drop_starts_a_new_curve():
    tracker = ConvergenceTracker(threshold=0.01, steps_per_epoch=10)
    for step in range(0, 100, 5):
        tracker.observe(step, 1 / (0.01 * step + 0.5) + 1, learning_rate=0.1)
    for step in range(100, 200, 5):
        tracker.observe(step, 1 / (0.02 * (step - 100) + 2), learning_rate=0.01)
    assert tracker.fit.start == 100
    assert tracker.fit.loss(150) == pytest.approx(1 / 3, rel=0.02)


@pytest.mark.parametrize(
    ("steps", "losses", "message"),
    [
        ([1, 2], [3.0, 2.0], "at least 3"),
        ([1, 3, 2], [3.0, 2.0, 1.0], "increase"),
        ([1, 2, 3], [3.0, -2.0, 1.0], "positive"),
        ([1, 2, 3], [3.0, math.nan, 1.0], "finite"),
    ],
)
def test_bad_curves_are_refused(steps, losses, message):
    with pytest.raises(ConfigurationError, match=message):
        fit_convergence(steps, losses)


def test_tracker_refuses_a_threshold_of_zero():
    with pytest.raises(ConfigurationError, match="positive"):
        ConvergenceTracker(threshold=0, steps_per_epoch=1)


def test_stragglers_run_at_half_the_median_or_less():
    assert find_stragglers([1.0, 1.0, 0.5, 0.51, 1.0]) == [2]
    assert find_stragglers([0.1]) == []

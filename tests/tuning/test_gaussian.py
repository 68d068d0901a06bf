"""Our Gaussian process against scikit-learn's, and the properties that the search relies on."""

from __future__ import annotations

import numpy as np
import pytest

from bytescheduler.tuning.gaussian import PRIOR_DEVIATION, condition, expected_improvement, fit

LENGTHS = np.array([3.0, 2.0, 1.0, 1.0])


def points(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.column_stack(
        [
            rng.uniform(14, 24, count),
            rng.integers(0, 5, count),
            rng.integers(0, 2, count),
            rng.integers(0, 2, count),
        ]
    ).astype(float)


def test_posterior_equals_that_of_scikit_learn() -> None:
    process = pytest.importorskip("sklearn.gaussian_process")
    x, new = points(12, seed=0), points(30, seed=1)
    y = np.sin(x[:, 0]) + 0.1 * x[:, 1]
    ours = condition(x, y, np.full(12, 0.01), LENGTHS)
    kernel = ours.variance * process.kernels.Matern(length_scale=LENGTHS, nu=2.5)
    noise = ours.variance * (0.01 / PRIOR_DEVIATION) ** 2
    theirs = process.GaussianProcessRegressor(kernel, alpha=noise, optimizer=None)
    theirs.fit(x, y - np.mean(y))
    mean, deviation = theirs.predict(new, return_std=True)
    ours_mean, ours_deviation = ours.posterior(new)
    np.testing.assert_allclose(ours_mean - np.mean(y), mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(ours_deviation, deviation, rtol=1e-5, atol=1e-7)


def test_targets_without_noise_are_met() -> None:
    x = points(8, seed=2)
    y = np.cos(x[:, 0])
    mean, deviation = fit(x, y, np.full(8, 1e-6)).posterior(x)
    np.testing.assert_allclose(mean, y, atol=1e-4)
    assert np.max(deviation) < 1e-2


def test_expected_improvement_equals_its_mean_over_draws() -> None:
    mean, deviation = np.array([0.1, -0.2, 0.5]), np.array([0.3, 0.1, 0.01])
    draws = np.random.default_rng(0).normal(mean, deviation, (400_000, 3))
    expected = np.maximum(0.0 - draws, 0.0).mean(axis=0)
    np.testing.assert_allclose(expected_improvement(mean, deviation, 0.0), expected, atol=2e-3)


def test_repeated_points_do_not_break_it() -> None:
    x = np.repeat(points(3, seed=4), 4, axis=0)
    mean, deviation = fit(x, np.ones(12), np.full(12, 0.001)).posterior(x)
    assert np.all(np.isfinite(mean))
    assert np.all(np.isfinite(deviation))

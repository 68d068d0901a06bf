"""How many steps a job still needs, from the losses seen so far (Optimus, EuroSys 2018).

    l = 1 / (b0*k + b1) + b2,  all b >= 0;  l: loss divided by the largest seen, k: step

For a fixed b2, ``1/(l - b2)`` is linear in k: non-negative least squares gives b0 and b1, inside a
one-dimensional search over b2. A general optimiser over all three was considered: it needs a start,
finds local minima, and is slower. Rows are weighted by ``(l - b2)**2``: inverting multiplies a
loss's error by ``1/(l - b2)**2``, and without the weights the last, smallest losses would drown the
rest. Steps are divided by the largest, which keeps the problem well conditioned.

A job has converged when the loss decreases by less than the owner's threshold (a fraction of the
largest loss) from epoch to epoch, for several epochs. A drop of the learning rate starts a new
curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bytescheduler._imports import require
from bytescheduler.exceptions import ConfigurationError

__all__ = ["ConvergenceFit", "ConvergenceTracker", "fit_convergence", "replace_outliers"]

Floats = npt.NDArray[np.float64]
OUTLIER_WINDOW = 5
FEWEST_POINTS = 3
GRID_POINTS = 24
PATIENCE_EPOCHS = 3
LEARNING_RATE_DROP = 0.5
RESAMPLES = 40
MOST_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceFit:
    """A fitted loss curve.

    Attributes:
        b0, b1, b2: coefficients for normalised losses and steps counted from ``start``.
        scale: the loss that counts as 1.
        start: step at which this curve begins (the last drop of the learning rate, or 0).
        residual: standard deviation of the normalised losses around the curve.
    """

    b0: float
    b1: float
    b2: float
    scale: float = 1.0
    start: float = 0.0
    residual: float = 0.0

    def loss(self, step: float) -> float:
        """Return the predicted loss at ``step``."""
        return self.scale * self._normalised(step - self.start)

    def _normalised(self, k: float) -> float:
        divisor = self.b0 * k + self.b1
        return (1 / divisor if divisor > 0 else math.inf) + self.b2

    def convergence_step(self, threshold: float, steps_per_epoch: float, patience: int) -> float:
        """Return the step by which ``patience`` epochs in a row decreased by less than threshold.

        From x = b0*k + b1 to x + d (d = b0 * steps per epoch) the loss falls by d / (x * (x + d)),
        which never grows with k, so the first such epoch is a root of a quadratic.

        Args:
            threshold: smallest decrease per epoch that counts, as a fraction of the largest loss.
            steps_per_epoch: steps in one epoch.
            patience: epochs in a row that must stay below it.
        """
        d = self.b0 * steps_per_epoch
        if d <= 0:
            return self.start + patience * steps_per_epoch
        x = (-d + math.sqrt(d * d + 4 * d / threshold)) / 2
        first_epoch = max(0, math.ceil((x - self.b1) / d - 1e-9))
        return self.start + (first_epoch + patience) * steps_per_epoch


def replace_outliers(losses: Sequence[float]) -> Floats:
    """Replace points outside [min of the next 5, max of the previous 5] by their neighbours' mean.

    The first and the last point have no such window on one side and stay.
    """
    raw = np.asarray(losses, float)
    cleaned = raw.copy()
    for i in range(1, len(raw) - 1):
        before = cleaned[max(0, i - OUTLIER_WINDOW) : i]
        after = raw[i + 1 : i + 1 + OUTLIER_WINDOW]
        if not after.min() <= raw[i] <= before.max():
            cleaned[i] = (cleaned[i - 1] + raw[i + 1]) / 2
    return cleaned


def fit_convergence(
    steps: Sequence[float], losses: Sequence[float], *, start: float = 0.0
) -> ConvergenceFit:
    """Fit the loss curve.

    Args:
        steps: increasing step numbers (at least three).
        losses: the losses there, positive.
        start: step at which this curve begins.

    Raises:
        ConfigurationError: too few points, steps that do not increase or losses not positive.
    """
    k, cleaned = _checked(steps, losses, start)
    scale = float(cleaned.max())
    normalised, span = cleaned / scale, float(k.max()) or 1.0
    b0, b1, b2 = _search(k / span, normalised)
    fit = ConvergenceFit(b0=b0 / span, b1=b1, b2=b2, scale=scale, start=start)
    errors = normalised - _curve(k / span, b0, b1, b2)
    return replace(fit, residual=float(np.sqrt(np.mean(errors**2))))


def _checked(
    steps: Sequence[float], losses: Sequence[float], start: float
) -> tuple[Floats, Floats]:
    k = np.asarray(steps, float) - start
    if len(steps) != len(losses) or len(steps) < FEWEST_POINTS:
        raise ConfigurationError(
            f"a loss curve needs at least {FEWEST_POINTS} steps with a loss each, "
            f"got {len(steps)} steps and {len(losses)} losses"
        )
    if np.any(np.diff(k) <= 0) or k[0] < 0:
        raise ConfigurationError("steps must increase and not lie before the curve's start")
    if not all(0 < loss < math.inf for loss in losses):
        raise ConfigurationError("losses must be finite and positive; shift them or drop the rows")
    return k, replace_outliers(losses)


def _curve(x: Floats, b0: float, b1: float, b2: float) -> Floats:
    return 1 / np.maximum(b0 * x + b1, 1e-12) + b2


def _line_for(x: Floats, losses: Floats, b2: float) -> tuple[float, float]:
    """Return b0 and b1 for a given b2 by weighted non-negative least squares.

    Two unknowns: where the unconstrained optimum is not negative it is the answer, otherwise the
    better of the two edges. This is what an active-set solver does, without its overhead.
    """
    above = losses - b2
    weight = above**2
    x_w, y_w = x * weight, above
    xx, xo, oo = float(x_w @ x_w), float(x_w @ weight), float(weight @ weight)
    xy, oy = float(x_w @ y_w), float(weight @ y_w)
    determinant = xx * oo - xo * xo
    if determinant > 0:
        b0, b1 = (xy * oo - oy * xo) / determinant, (oy * xx - xy * xo) / determinant
        if b0 >= 0 and b1 >= 0:
            return b0, b1
    only_slope, only_offset = (xy / xx if xx > 0 else 0.0), oy / oo
    slope_gain, offset_gain = only_slope * xy, only_offset * oy
    return (only_slope, 0.0) if slope_gain > offset_gain else (0.0, only_offset)


def _misfit(x: Floats, losses: Floats, b2: float) -> float:
    b0, b1 = _line_for(x, losses, b2)
    errors = losses - _curve(x, b0, b1, b2)
    return float(errors @ errors)


def _search(x: Floats, losses: Floats) -> tuple[float, float, float]:
    """Search b2 between 0 and the smallest loss: a grid first, then Brent's method around it."""
    top = float(losses.min()) * (1 - 1e-6)
    grid = top * (1 - np.geomspace(1e-4, 1, GRID_POINTS))[::-1]
    costs = [_misfit(x, losses, float(b2)) for b2 in grid]
    best = int(np.argmin(costs))
    bounds = (float(grid[max(0, best - 1)]), float(grid[min(GRID_POINTS - 1, best + 1)]))
    optimum = require("scipy.optimize", extra="cluster").minimize_scalar(
        lambda b2: _misfit(x, losses, b2),
        bounds=bounds,
        method="bounded",
        options={"xatol": 1e-7},
    )
    b2 = float(optimum.x) if optimum.fun <= costs[best] else float(grid[best])
    return (*_line_for(x, losses, b2), b2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsLeft:
    """Predicted steps left, with the interval that holds 90 % of resampled fits."""

    expected: float
    low: float
    high: float


class ConvergenceTracker:
    """A loss curve that is fitted as losses come in.

    Args:
        threshold: smallest decrease per epoch that counts, as a fraction of the largest loss.
        steps_per_epoch: steps in one epoch.
        patience: epochs in a row that must stay below the threshold.

    Raises:
        ConfigurationError: a number that is not positive.
    """

    def __init__(
        self, *, threshold: float, steps_per_epoch: float, patience: int = PATIENCE_EPOCHS
    ) -> None:
        if threshold <= 0 or steps_per_epoch <= 0 or patience < 1:
            raise ConfigurationError(
                "threshold, steps_per_epoch and patience must be positive, got "
                f"{threshold}, {steps_per_epoch}, {patience}"
            )
        self._threshold = threshold
        self._steps_per_epoch = steps_per_epoch
        self._patience = patience
        self._start = 0.0
        self._rate: float | None = None
        self._steps: list[float] = []
        self._losses: list[float] = []
        self._fit: ConvergenceFit | None = None

    def observe(self, step: float, loss: float, learning_rate: float | None = None) -> None:
        """Take one loss into account; a learning rate halved or less restarts the fit."""
        if self._rate and learning_rate and learning_rate <= LEARNING_RATE_DROP * self._rate:
            self.restart(step)
        self._rate = learning_rate or self._rate
        self._steps.append(step)
        self._losses.append(loss)
        self._fit = None

    def restart(self, step: float) -> None:
        """Forget the losses so far; a new curve begins at ``step``."""
        self._steps, self._losses, self._start, self._fit = [], [], step, None

    @property
    def ready(self) -> bool:
        """Whether there are enough losses for a fit."""
        return len(self._steps) >= FEWEST_POINTS

    @property
    def fit(self) -> ConvergenceFit:
        """The curve fitted to the losses since the last restart."""
        if self._fit is None:
            steps, losses = _thinned(self._steps), _thinned(self._losses)
            self._fit = fit_convergence(steps, losses, start=self._start)
        return self._fit

    def steps_left(self, step: float) -> float:
        """Return the steps from ``step`` until convergence, at least 0."""
        return self._left(self.fit, step)

    def _left(self, fit: ConvergenceFit, step: float) -> float:
        end = fit.convergence_step(self._threshold, self._steps_per_epoch, self._patience)
        return max(0.0, end - step)

    def interval(self, step: float, seed: int = 0) -> StepsLeft:
        """Return the steps left with an interval, by refitting to resampled residuals."""
        fit, rng = self.fit, np.random.default_rng(seed)
        steps = np.array(_thinned(self._steps))
        smooth = np.array([fit.loss(s) for s in steps])
        noise = rng.normal(0, fit.residual * fit.scale, (RESAMPLES, len(steps)))
        resampled = np.maximum(smooth + noise, 1e-9 * fit.scale)
        left = [
            self._left(fit_convergence(steps.tolist(), losses.tolist(), start=self._start), step)
            for losses in resampled
        ]
        low, high = np.quantile(left, [0.05, 0.95])
        expected = self._left(fit, step)
        return StepsLeft(
            expected=expected, low=min(float(low), expected), high=max(float(high), expected)
        )


def _thinned(values: list[float]) -> list[float]:
    """Return at most a few hundred values, evenly chosen, the last one among them."""
    stride = -(-len(values) // MOST_POINTS)
    return values[::-1][::stride][::-1]

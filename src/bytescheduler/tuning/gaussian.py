"""A Gaussian process and the expected improvement, in NumPy, for a few dozen points.

scikit-optimize does the same and more, and ``bytescheduler tune`` uses it. Inside a training loop
it is out of place: importing it takes seconds and one ``tell`` about one more, all in the process
that trains, which for a small model alone is over the 2 % that tuning may cost. Here the candidates
are a grid and the length scales are picked from a short list, so an ``ask`` takes milliseconds,
needs NumPy only, starts no thread, and is deterministic. A test holds the posterior against
scikit-learn's.

Notation (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006)::

    X, y       (n, d) features and (n,) targets, y being log seconds
    K          (n, n) kernel matrix, Matern 5/2 with one length scale per feature
    s2, noise  variance of the signal and (n,) of each target's noise, relative to s2
    L, alpha   Cholesky factor of K + diag(noise), and (K + diag(noise))^-1 (y - m); eq. 2.25
    mu, sigma  (c,) mean and deviation of the posterior at c candidates; eq. 2.25, 2.26
    EI         expected improvement below the best mean: (f - mu) Phi(z) + sigma phi(z),
               z = (f - mu) / sigma (Jones et al. 1998, eq. 15)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["GaussianProcess", "expected_improvement", "fit"]

Array = npt.NDArray[np.float64]

LENGTHS: Final = (
    (1.5, 3.0, 6.0),  # octaves of partition size
    (2.0, 4.0),  # octaves of credit over partition
    (1.0, 3.0),  # out of order or not
    (1.0,),  # barrier or not
)
PRIOR_DEVIATION: Final = 0.2  # of log seconds between good and bad settings
PRIOR_WEIGHT: Final = 3.0  # targets that the prior counts for
JITTER: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GaussianProcess:
    """A process conditioned on targets; see the notation above."""

    x: Array
    lengths: Array
    mean: float
    variance: float
    factor: Array
    alpha: Array
    log_likelihood: float

    def posterior(self, x: Array) -> tuple[Array, Array]:
        """Mean and deviation, each of shape (c,), at ``x`` of shape (c, d)."""
        cross = _matern(x, self.x, self.lengths)
        half = np.linalg.solve(self.factor, cross.T)
        left = np.maximum(1.0 - np.sum(half * half, axis=0), 1e-12)
        return self.mean + cross @ self.alpha, np.sqrt(self.variance * left)


def fit(x: Array, y: Array, deviations: Array) -> GaussianProcess:
    """Condition on targets ``y`` (n,) at ``x`` (n, d), and pick the likeliest length scales.

    Args:
        deviations: (n,) standard errors of the targets.
    """
    return max(
        (condition(x, y, deviations, np.array(lengths)) for lengths in product(*LENGTHS)),
        key=lambda process: process.log_likelihood,
    )


def condition(x: Array, y: Array, deviations: Array, lengths: Array) -> GaussianProcess:
    """The process with the given length scales; its signal variance is the likeliest one."""
    count = len(y)
    kernel = _matern(x, x, lengths)
    noise = (deviations / PRIOR_DEVIATION) ** 2 + JITTER
    factor = np.linalg.cholesky(kernel + np.diag(noise))
    mean = float(np.mean(y))
    white = np.linalg.solve(factor, y - mean)
    prior = PRIOR_WEIGHT * PRIOR_DEVIATION**2
    variance = float((white @ white + prior) / (count + PRIOR_WEIGHT))
    return GaussianProcess(
        x=x,
        lengths=lengths,
        mean=mean,
        variance=variance,
        factor=factor,
        alpha=np.linalg.solve(factor.T, white),
        log_likelihood=-0.5 * (count + PRIOR_WEIGHT) * math.log(variance)
        - float(np.sum(np.log(np.diag(factor)))),
    )


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """How much below ``best`` each candidate is expected to be; all of shape (c,)."""
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    cumulative = 0.5 * (1.0 + np.array([math.erf(value / math.sqrt(2)) for value in z]))
    return (best - mean) * cumulative + deviation * density


def _matern(a: Array, b: Array, lengths: Array) -> Array:
    """Matern 5/2 kernel between the rows of (m, d) ``a`` and (n, d) ``b``: shape (m, n)."""
    difference = (a[:, None, :] - b[None, :, :]) / lengths
    distance = math.sqrt(5.0) * np.sqrt(np.sum(difference * difference, axis=2))
    return (1.0 + distance + distance * distance / 3.0) * np.exp(-distance)

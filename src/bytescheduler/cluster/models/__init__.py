"""What Optimus learns of a job while it runs: how much work is left and how fast it goes."""

from bytescheduler.cluster.models.convergence import (
    ConvergenceFit,
    ConvergenceTracker,
    fit_convergence,
    replace_outliers,
)
from bytescheduler.cluster.models.speed import (
    Measurement,
    SpeedModel,
    SpeedTracker,
    fit_speed,
)
from bytescheduler.cluster.models.stragglers import find_stragglers

__all__ = [
    "ConvergenceFit",
    "ConvergenceTracker",
    "Measurement",
    "SpeedModel",
    "SpeedTracker",
    "find_stragglers",
    "fit_convergence",
    "fit_speed",
    "replace_outliers",
]

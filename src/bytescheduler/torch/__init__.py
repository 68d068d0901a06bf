"""PyTorch: wrap your optimizer, change nothing else.

>>> optimizer = bytescheduler.torch.ScheduledOptimizer(optimizer, model)  # doctest: +SKIP
"""

from bytescheduler._imports import require

require("torch", extra="torch")

from bytescheduler.torch.optimizer import ScheduledOptimizer  # noqa: E402

__all__ = ["ScheduledOptimizer"]

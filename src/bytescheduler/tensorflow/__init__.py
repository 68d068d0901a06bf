"""TensorFlow and Keras 3: ``model.fit`` with gradients exchanged in priority order.

Import this module *before* the first tensor, variable or model is made: importing declares the
cluster of ``TF_CONFIG`` (or of torchrun or horovodrun) to TensorFlow, which opens its port with the
first operation. In a parameter-server job import it before ``tensorflow`` and ``keras`` too. Then::

    import bytescheduler.tensorflow as bs

    optimizer = bs.ScheduledOptimizer(keras.optimizers.AdamW(1e-3), model)
    model.compile(optimizer=optimizer, loss=..., jit_compile=False)
    model.fit(...)
"""

from bytescheduler._imports import require
from bytescheduler.tensorflow.servers import load_first

load_first()
require("tensorflow", extra="tensorflow")
require("keras", extra="tensorflow")

from bytescheduler.tensorflow.cluster import Cluster, current, declare  # noqa: E402
from bytescheduler.tensorflow.optimizer import ScheduledOptimizer  # noqa: E402

__all__ = ["Cluster", "ScheduledOptimizer", "rank", "world_size"]

declare()


def rank() -> int:
    """This worker's number, for sharding data before there is an optimizer.

    Raises:
        ConfigurationError: no cluster is described, or wrongly.
    """
    return current().rank


def world_size() -> int:
    """Number of workers.

    Raises:
        ConfigurationError: no cluster is described, or wrongly.
    """
    return current().world_size

"""Scheduled gradient exchange for MXNet Gluon on parameter servers.

Hand a ``ScheduledKVStore`` to ``gluon.Trainer``, or use ``ScheduledTrainer`` in its place. Nothing
else changes: MXNet's own engine holds a layer's forward back until its weights are there.
"""

from bytescheduler.mxnet.kvstore import ScheduledKVStore
from bytescheduler.mxnet.trainer import ScheduledTrainer

__all__ = ["ScheduledKVStore", "ScheduledTrainer"]

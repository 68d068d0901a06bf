"""``ScheduledTrainer``: ``gluon.Trainer`` over a ``ScheduledKVStore``."""

from __future__ import annotations

from typing import Any

from bytescheduler import _mxnet_import
from bytescheduler.exceptions import ConfigurationError
from bytescheduler.mxnet.kvstore import ScheduledKVStore

__all__ = ["ScheduledTrainer"]

mxnet = _mxnet_import.load()


class ScheduledTrainer(mxnet.gluon.Trainer):
    """A ``gluon.Trainer`` whose gradients travel by priority.

    Args:
        params, optimizer, optimizer_params, compression_params, update_on_kvstore: as for
            ``gluon.Trainer``.
        kvstore: a distributed KVStore, a name (``dist_sync``, ``dist_async``), or a
            ``ScheduledKVStore``, which then has its own settings.
        scheduling: ``partition_size``, ``credit_size``, ``mode`` and ``trace``; see
            ``ScheduledKVStore``.

    Raises:
        ConfigurationError: as ``ScheduledKVStore``; or ``scheduling`` is given twice, or updates on
            workers are asked of ``dist_async``.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        kvstore: Any = "dist_sync",
        compression_params: Any = None,
        update_on_kvstore: bool | None = None,
        **scheduling: Any,
    ) -> None:
        self.scheduled = _scheduled(kvstore, scheduling)
        if update_on_kvstore is False and "async" in self.scheduled.type:
            raise ConfigurationError(
                "with dist_async the servers must update the weights, got update_on_kvstore=False; "
                "leave it out, or use dist_sync"
            )
        super().__init__(
            params,
            optimizer,
            optimizer_params,
            kvstore=self.scheduled,
            compression_params=compression_params,
            update_on_kvstore=update_on_kvstore,
        )

    def synchronize(self) -> None:
        """Wait until the last step's updates are done.

        Raises:
            TransportError: the exchange failed.
        """
        self.scheduled.synchronize()


def _scheduled(kvstore: Any, scheduling: dict[str, Any]) -> ScheduledKVStore:
    if not isinstance(kvstore, ScheduledKVStore):
        return ScheduledKVStore(kvstore, **scheduling)
    if scheduling:
        raise ConfigurationError(
            f"a ScheduledKVStore has its own settings, got {sorted(scheduling)} beside it; pass "
            "them to ScheduledKVStore, or the inner store to ScheduledTrainer"
        )
    return kvstore

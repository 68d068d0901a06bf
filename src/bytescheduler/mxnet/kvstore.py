"""``ScheduledKVStore``: an MXNet KVStore whose dense pushes and pulls go by priority, in chunks.

MXNet's engine already starts a push when the gradient is ready and a layer's forward when its
weight is; what it lacks is an order on the wire. This store copies a gradient into a flat buffer,
lets the exchange send chunks of it by priority under rank 0's credit, and has the engine hold the
slot until it is back: whoever reads the weight or the averaged gradient waits for that, inside the
engine, and nobody else does.

What is scheduled must be known before the flat buffer is laid out. With updates on the workers the
first iteration therefore goes through MXNet's own store and shows which keys are pushed; with
updates on the servers the optimizer knows the parameters.

Sparse arrays, gradient compression, keys that are texts, and keys that appear later go through
MXNet's own store.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from bytescheduler import _mxnet_import
from bytescheduler._dmlc import require_variables
from bytescheduler.core import Exchange, TraceRecorder, resolve_settings
from bytescheduler.core.exchange import Tuner
from bytescheduler.core.trace import Observer
from bytescheduler.exceptions import ConfigurationError, RankMismatchError, UsageError
from bytescheduler.mxnet._rounds import Rounds
from bytescheduler.mxnet._staging import Staging
from bytescheduler.mxnet._updates import AsyncUpdates, SyncUpdates, require_elementwise
from bytescheduler.transports._kvstore_channel import AWAKE
from bytescheduler.transports._kvstore_engine import Engine
from bytescheduler.transports._kvstore_membership import membership
from bytescheduler.transports._kvstore_rendezvous import create_kvstore
from bytescheduler.transports.kvstore import KVStoreTransport

__all__ = ["ScheduledKVStore"]

PROBE_BYTES: Final = 4 << 20  # broadcast once, at most, to see the rate of the network

mxnet = _mxnet_import.load()


class ScheduledKVStore(mxnet.kv.KVStoreBase):
    """Wraps a distributed KVStore; hand it to ``gluon.Trainer(kvstore=...)``.

    Args:
        kv: an ``mxnet.kv.KVStore``, or the name of one to create: ``dist_sync``, ``dist_async``.
        partition_size, credit_size, mode, trace: as everywhere, see ``bytescheduler.Settings``;
            sizes in bytes or as text such as ``"4MiB"``. Rank 0's count.

    Results are what ``kv`` would give: sums over workers, or the servers' weights.

    Raises:
        ConfigurationError: ``kv`` is not distributed, a setting breaks a rule, or a ``DMLC_*``
            variable is missing or wrong.
    """

    def __init__(
        self,
        kv: Any = "dist_sync",
        *,
        partition_size: int | str | None = None,
        credit_size: int | str | None = None,
        mode: str | None = None,
        trace: str | None = None,
    ) -> None:
        self._resolve = partial(
            resolve_settings,
            partition_size=partition_size,
            credit_size=credit_size,
            mode=mode,
            trace=trace,
        )
        self.settings = self._resolve()
        self._inner = _create(kv) if isinstance(kv, str) else kv
        if "dist" not in self._inner.type:
            raise ConfigurationError(
                f"there is nothing to schedule in a store of type {self._inner.type!r}; pass one "
                "of type dist_sync or dist_async"
            )
        self._engine = Engine()
        self._membership = membership(self._inner)
        self._optimizer: Any = None
        self._compressed = False
        self._shapes: dict[Any, tuple[int, ...]] = {}
        self._dtypes: dict[Any, np.dtype[Any]] = {}
        self._seen: dict[Any, int] = {}  # priorities of the keys of the first iteration
        self._staging: Staging | None = None
        self._transport: KVStoreTransport | None = None
        self._exchange: Exchange | None = None
        self._rounds: Rounds | None = None

    # -- what MXNet asks for

    @property
    def type(self) -> str:
        """The inner store's."""
        return self._inner.type

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._inner.rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._inner.num_workers

    def is_capable(self, capability: str) -> bool:
        """Whether the inner store's servers can run optimizers."""
        return self._inner.is_capable(capability)

    def init(self, key: Any, value: Any) -> None:
        """Collective: make keys, with rank 0's values."""
        pairs = _pairs(key, value)
        for one, arrays in pairs:
            dense = arrays[0].stype == "default" and isinstance(one, int)
            if dense and not self._compressed:
                self._shapes[one] = tuple(arrays[0].shape)
                self._dtypes[one] = np.dtype(arrays[0].dtype)
            else:
                self._inner.init(one, arrays[0])
        ours = {one: arrays[0] for one, arrays in pairs if one in self._shapes}
        self._membership.store.create(list(ours), list(ours.values()))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Collective: make keys with rank 0's values, and write these into ``out``."""
        self.init(key, value)
        for one, arrays in _pairs(key, out):
            self.pull(one, arrays, priority)
            # MXNet orders this pull before no push; a gradient must not get there first
            for array in arrays:
                array.wait_to_read()

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Send gradients; lists of keys and of arrays, one per device, as in MXNet."""
        for one, arrays in _pairs(key, value):
            if self._schedules(one, arrays, priority):
                self._post(one, arrays)
            else:
                self._push_plainly(one, arrays, priority)

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Write sums, or the servers' weights, into ``out``."""
        for one, arrays in _pairs(key, out):
            if self._staging is not None and one in self._staging.position:
                self._staging.empty(self._staging.position[one], arrays)
            elif one in self._shapes:
                self._pull_plainly(one, arrays, priority)
            else:
                self._inner.pull(one, arrays, priority, ignore_sparse)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """``push``, then ``pull`` into ``out``, or into ``value``."""
        outputs = dict(_pairs(key, value if out is None else out))
        for one, arrays in _pairs(key, value):
            self.push(one, arrays, priority)
            self.pull(one, outputs[one], priority)

    def row_sparse_pull(self, *args: Any, **kwargs: Any) -> None:
        """As in MXNet."""
        self._inner.row_sparse_pull(*args, **kwargs)

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Collective: leave everything to MXNet, which compresses all that its store pushes.

        Nothing is scheduled then, and nobody watches for lost peers: signs of life would be
        compressed as well.

        Raises:
            UsageError: gradients are scheduled already.
        """
        if self._exchange is not None:
            raise UsageError(
                "gradient compression must be set before the first gradients are pushed; pass "
                "compression_params to the trainer"
            )
        self._compressed = True
        self._inner._barrier()  # nobody takes another's silence for a loss
        self._membership.watch.stop()
        self._inner.set_gradient_compression(compression_params)

    def set_optimizer(self, optimizer: Any) -> None:
        """The servers are to update the weights; takes effect with the first push.

        Raises:
            ConfigurationError: the optimizer needs whole tensors.
        """
        if self._compressed:
            self._inner.set_optimizer(optimizer)
            return
        require_elementwise(optimizer)
        self._optimizer = optimizer
        self.settings = self._resolve(tunable=False)  # servers' pieces keep their size

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Refused: the states lie on the servers, where MXNet cannot read them.

        Raises:
            UsageError: always.
        """
        raise _states_are_on_servers("saved")

    def load_optimizer_states(self, fname: str) -> None:
        """Refused: the states lie on the servers, where MXNet cannot write them.

        Raises:
            UsageError: always.
        """
        raise _states_are_on_servers("loaded")

    # -- beyond

    def synchronize(self) -> None:
        """Wait until every gradient that was pushed is back.

        Raises:
            TransportError: the exchange failed.
        """
        self._engine.mxnet.nd.waitall()
        self._raise_if_failed()

    def close(self) -> None:
        """Wait for what is in flight, and end the exchange. Called at exit."""
        exchange, self._exchange = self._exchange, None
        if exchange is None or self._transport is None:
            return
        if exchange.error is None:
            self._transport.wake(AWAKE)  # else nobody listens to rank 0's farewell
        exchange.close()
        self._write_trace()

    # -- inside

    def _push_plainly(self, key: Any, arrays: Sequence[Any], priority: int) -> None:
        if key not in self._shapes:
            self._inner.push(key, list(arrays), priority)
            return
        one = arrays[0]
        if len(arrays) > 1:
            one = mxnet.nd.ElementWiseSum(*[array.as_in_context(mxnet.cpu()) for array in arrays])
        self._membership.store.push(key, one, priority)

    def _pull_plainly(self, key: Any, arrays: Sequence[Any], priority: int) -> None:
        for array in arrays:
            self._membership.store.pull(key, array, priority)

    def _schedules(self, key: Any, arrays: Sequence[Any], priority: int) -> bool:
        if self._compressed or arrays[0].stype != "default" or key not in self._shapes:
            return False
        self._raise_if_failed()
        if self._staging is None:
            if self._optimizer is not None:
                self._build(self._trainable())
            elif self._first_seen(key, priority):
                return False
            else:
                self._build(sorted(self._seen, key=lambda key: -self._seen[key]))
        return self._staging is not None and key in self._staging.position

    def _first_seen(self, key: Any, priority: int) -> bool:
        if "async" in self._inner.type:
            raise ConfigurationError(
                "dist_async servers add nothing up, they update weights as gradients come; call "
                "set_optimizer, or pass update_on_kvstore=True to the trainer, or use dist_sync"
            )
        first = key not in self._seen
        self._seen.setdefault(key, priority)
        return first

    def _post(self, key: Any, arrays: Sequence[Any]) -> None:
        staging, rounds = self._staging, self._rounds
        assert staging is not None
        assert rounds is not None
        position = staging.position[key]
        staging.fill(position, arrays)

        def begin(release: Callable[[], None]) -> None:
            staging.raise_flag(position)
            rounds.post(position, release)

        self._engine.hold(begin, [staging.arrays[position]])

    def _trainable(self) -> list[Any]:
        parameters = self._optimizer.param_dict
        return [
            key
            for key in self._shapes
            if key not in parameters or parameters[key].grad_req != "null"
        ]

    def _build(self, keys: Sequence[Any]) -> None:
        staging = Staging(
            self._engine,
            {key: self._shapes[key] for key in keys},
            self._dtypes,
        )
        transport = self._transport = self._open(staging)
        self._agree(transport, staging)
        bandwidth = self._settle_sizes(transport, staging)
        self._observer = self._make_observer()
        self._exchange = Exchange(
            staging.layout,
            staging.buffers,
            transport,
            self.settings,
            observer=self._observer,
            tuner=self._make_tuner(staging, bandwidth),
        )
        if isinstance(transport, SyncUpdates):
            transport.install(self._optimizer, dict(enumerate(staging.keys)))
        self._rounds = Rounds(self._exchange, transport.wake)
        self._staging = staging
        atexit.register(self.close)

    def _open(self, staging: Staging) -> KVStoreTransport:
        if self._optimizer is None:
            return KVStoreTransport(self._inner, average=False, rests=True)
        if self.settings.mode == "auto":
            raise ConfigurationError(
                "mode 'auto' tries partition sizes, which cannot change while the servers update "
                "the weights; pass update_on_kvstore=False, or another mode"
            )
        kind = AsyncUpdates if "async" in self._inner.type else SyncUpdates
        return kind(self._inner, staging.layout, staging.buffers, self._server_weights(staging))

    def _server_weights(self, staging: Staging) -> dict[str, Any]:
        """What MXNet's own keys hold, laid out as the gradients will be."""
        for key, array in zip(staging.keys, staging.arrays, strict=True):
            self._pull_plainly(key, [array], 0)
            array.wait_to_read()
        return {name: buffer.copy() for name, buffer in staging.buffers.items()}

    def _agree(self, transport: KVStoreTransport, staging: Staging) -> None:
        if transport.world_size == 1:
            return
        digests = transport.exchange(_digest(staging).encode())
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RankMismatchError(
                "all workers must push the same keys, shapes and dtypes; those of workers "
                f"{others} differ from worker 0's"
            )

    def _settle_sizes(self, transport: KVStoreTransport, staging: Staging) -> float | None:
        """Collective: sizes that suit the rate of the network, which is returned (bytes/s).

        Pieces that servers update keep their size for good, and are left as they were asked for.
        """
        if self._optimizer is not None:
            return None
        from bytescheduler.tuning import settings_of_rank_0, timed_broadcast

        probe = np.zeros(min(staging.nbytes, PROBE_BYTES), np.uint8)
        rate = timed_broadcast(transport, lambda: transport.broadcast(probe), probe.nbytes)
        settings = self._resolve(
            model_bytes=staging.nbytes, bandwidth=rate, least_chunks=transport.least_chunks
        )
        self.settings = settings_of_rank_0(transport, settings)
        return rate

    def _make_tuner(self, staging: Staging, bandwidth: float | None) -> Tuner | None:
        if self.rank != 0:
            return None
        from bytescheduler.tuning import make_tuner

        return make_tuner(
            self.settings,
            signature=_digest(staging),
            world_size=self.num_workers,
            engine="kvstore",
            device="cpu",
            total_bytes=staging.nbytes,
            bandwidth=bandwidth,
        )

    def _make_observer(self) -> Observer | None:
        if self.settings.trace is None:
            return None
        return TraceRecorder(self.settings.trace, self.rank, self.num_workers)

    def _write_trace(self) -> None:
        if isinstance(self._observer, TraceRecorder):
            self._observer.write()

    def _raise_if_failed(self) -> None:
        if self._membership.error is not None:
            raise self._membership.error
        exchange = self._exchange
        if exchange is not None and exchange.error is not None:
            exchange.wait(range(len(exchange.layout.specs)))
            raise exchange.error


def _states_are_on_servers(action: str) -> UsageError:
    return UsageError(
        f"an optimizer's states cannot be {action} where the servers update the weights, since "
        "MXNet has no way to them there; pass update_on_kvstore=False to keep them on the workers"
    )


def _create(kind: str) -> Any:
    import os

    return create_kvstore(kind, require_variables(os.environ, role="worker"))


def _pairs(key: Any, value: Any) -> list[tuple[Any, list[Any]]]:
    """Keys, each with its arrays, however MXNet's callers nest them."""
    if isinstance(key, list | tuple):
        return [pair for one, each in zip(key, value, strict=True) for pair in _pairs(one, each)]
    return [(key, list(value) if isinstance(value, list | tuple) else [value])]


def _digest(staging: Staging) -> str:
    facts = [(spec.name, spec.numel, spec.buffer) for spec in staging.layout.specs]
    return hashlib.sha256(repr(facts).encode()).hexdigest()

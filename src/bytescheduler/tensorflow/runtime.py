"""What happens while a training step runs: gradients into the flat buffers, averages out of them.

These are the Python functions behind the graph's ``numpy_function`` nodes. TensorFlow runs them in
program order, one at a time, in threads of its executor. Arrays that go back into the graph are
copies: TensorFlow takes memory over from NumPy where it can, and an optimizer that assigns a
gradient (or a product that was computed in place) would make the flat buffer a variable's storage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bytescheduler.core import Exchange, Layout, ParameterSpec, Plan, Settings, TraceRecorder
from bytescheduler.exceptions import RankMismatchError, UsageError
from bytescheduler.transports import Transport, name_of
from bytescheduler.tuning import make_tuner, settings_of_rank_0, timed_broadcast

__all__ = ["Resolve", "Runtime"]

_Array = npt.NDArray[Any]


class Resolve(Protocol):
    """``resolve_settings`` with the user's values filled in."""

    def __call__(
        self,
        *,
        model_bytes: int | None = None,
        bandwidth: float | None = None,
        least_chunks: int = 1,
        tunable: bool = True,
    ) -> Settings: ...


class Runtime:
    """One rank's buffers and exchange.

    Args:
        specs: the trainable variables, in the model's order.
        dtypes: NumPy dtype of each flat buffer, by name.
        transport: closed by ``close``.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        dtypes: dict[str, Any],
        transport: Transport,
    ) -> None:
        self._specs = tuple(specs)
        self._dtypes = dtypes
        self._settings = Settings()
        self._bandwidth: float | None = None
        self._pending: set[int] = set()  # posted, and not yet applied to the variable
        self._exchange: Exchange | None = None
        self._trace: TraceRecorder | None = None
        self.transport = transport

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._exchange.settings if self._exchange is not None else self._settings

    @property
    def failed(self) -> bool:
        """Whether the exchange has broken down."""
        return self._exchange is not None and self._exchange.error is not None

    def first_plan(self) -> Plan:
        """How the buffers will be cut, as far as it is known before the forward order is."""
        return Layout(self._specs).cut(self.settings.partition_size, growing=self.settings.growing)

    def start(self, order: Sequence[int]) -> None:
        """Agree on rank 0's forward ``order`` and begin to exchange (collective, once)."""
        if self._exchange is not None:
            return
        order = self._agree(order)
        self._layout = Layout(self._specs, order)
        self._buffers: dict[str, _Array] = {
            name: np.zeros(size, self._dtypes[name]) for name, size in self._layout.sizes.items()
        }
        transport, settings = self.transport, self._settings
        if settings.trace is not None:
            self._trace = TraceRecorder(settings.trace, transport.rank, transport.world_size)
        self._exchange = Exchange(
            self._layout, self._buffers, transport, settings, self._trace, self._make_tuner()
        )

    def is_pending(self, indices: Sequence[int]) -> bool:
        """Whether one of these parameters has an update that was not applied."""
        return not self._pending.isdisjoint(indices)

    def collect(self, indices: Sequence[int]) -> list[_Array]:
        """Wait for the averages of ``indices`` that are pending and hand them out, once.

        Returns:
            First an int32 array: 1 where an average is to be applied, 0 where nothing was posted
            or no rank had a gradient. Then one array per index, empty where there is a 0.

        Raises:
            TransportError: the exchange failed or was closed.
        """
        due = [index for index in indices if index in self._pending]
        if due and self._exchange is not None:
            self._exchange.wait(due)
        self._pending.difference_update(due)
        present = [index in due and self._is_present(index) for index in indices]
        gradients = [
            self._view(index).copy() if given else self._empty(index)
            for index, given in zip(indices, present, strict=True)
        ]
        return [np.array(present, np.int32), *gradients]

    def post(self, indices: Sequence[int], gradients: Sequence[_Array]) -> None:
        """This rank's gradients of ``indices`` are known; send them when their turn comes.

        Raises:
            TransportError: the exchange failed or was closed.
        """
        assert self._exchange is not None
        for index in self._pending.intersection(indices):
            raise UsageError(f"{self._specs[index].name} was posted again before its update")
        for index, gradient in zip(indices, gradients, strict=True):
            self._fill(index, gradient.reshape(-1), present=True)
        self._exchange.post(*indices)

    def end_step(self) -> None:
        """Flush what this rank did not produce, and end the iteration.

        Raises:
            TransportError: the exchange failed or was closed.
            RankMismatchError: rank 0 counts other steps.
        """
        assert self._exchange is not None
        if self._exchange.round_open:
            missing = self._exchange.missing()
            for index in missing:
                self._fill(index, 0, present=False)
            self._exchange.post(*missing)
        self._exchange.step()
        if self._exchange.settings.mode == "barrier":
            self._exchange.wait(range(len(self._specs)))

    def share(self, arrays: Sequence[_Array], resolve: Resolve) -> list[_Array]:
        """Return rank 0's ``arrays``, and settle on sizes that suit the rate seen (collective).

        Raises:
            RankMismatchError: the ranks' models or optimizers differ.
        """
        self._require_same(arrays)
        result = [array.copy() for array in arrays]
        self._bandwidth = timed_broadcast(
            self.transport, lambda: self._broadcast(result), sum(array.nbytes for array in arrays)
        )
        settings = resolve(
            model_bytes=self._total_bytes,
            bandwidth=self._bandwidth,
            least_chunks=self.transport.least_chunks,
            tunable=self.transport.tunable,
        )
        self._settings = settings_of_rank_0(self.transport, settings)
        return result

    def _broadcast(self, arrays: Sequence[_Array]) -> None:
        """Overwrite with rank 0's content, one message per dtype."""
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            members = [array for array in arrays if array.dtype == dtype]
            flat = np.concatenate([array.reshape(-1) for array in members])
            self.transport.broadcast(flat)
            stops = np.cumsum([array.size for array in members])[:-1]
            for array, part in zip(members, np.split(flat, stops), strict=True):
                array[...] = part.reshape(array.shape)

    def close(self) -> None:
        """Stop the exchange and write the timeline. May be called twice, never raises."""
        if self._exchange is not None:
            self._exchange.close()
        self.transport.close()
        if self._trace is not None:
            self._trace.write()
            self._trace = None

    # -- inside

    def _fill(self, index: int, gradient: _Array | int, *, present: bool) -> None:
        """What this rank contributes to a parameter's average, into the buffer."""
        spec = self._specs[index]
        self._view(index)[:] = gradient
        self._buffers[spec.buffer][self._layout.flag_offset(index)] = present
        self._pending.add(index)

    def _view(self, index: int) -> _Array:
        spec, offset = self._specs[index], self._layout.offsets[index]
        return self._buffers[spec.buffer][offset : offset + spec.numel]

    def _empty(self, index: int) -> _Array:
        return np.empty(0, self._dtypes[self._specs[index].buffer])

    def _is_present(self, index: int) -> bool:
        flag = self._buffers[self._specs[index].buffer][self._layout.flag_offset(index)]
        return bool(flag > 0)

    def _agree(self, order: Sequence[int]) -> list[int]:
        return json.loads(self.transport.exchange(json.dumps(list(order)).encode())[0])

    def _require_same(self, arrays: Sequence[_Array]) -> None:
        """What is exchanged and what is about to be shared must agree, or calls would mix."""
        shared = [(array.shape, array.dtype.name) for array in arrays]
        mine = hashlib.sha256(repr((self._signature(), shared)).encode()).digest()
        everyone = self.transport.exchange(mine)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise RankMismatchError(
                    "all ranks must train the same model with the same optimizer; names, shapes or "
                    f"dtypes of rank {rank}'s variables differ from rank 0's. Build both from the "
                    "same code everywhere"
                )

    def _signature(self) -> str:
        parts = [(spec.name, spec.numel, spec.buffer) for spec in self._specs]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _make_tuner(self) -> Any:
        if self.transport.rank != 0:
            return None
        return make_tuner(
            self._settings,
            signature=self._signature(),
            world_size=self.transport.world_size,
            engine=name_of(self.transport),
            device="cpu",
            total_bytes=self._total_bytes,
            bandwidth=self._bandwidth,
        )

    @property
    def _total_bytes(self) -> int:
        return sum(spec.numel * spec.itemsize for spec in self._specs)

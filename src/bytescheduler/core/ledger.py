"""What the training thread and the sending thread both know of each parameter.

A parameter is *posted* when this rank's gradient lies in the buffer, and *returned* when every
element of its slot has come back. Returned elements are counted, not chunks, so that the ledger
does not care how the buffer is cut.

One lock; a waiter names exactly what it waits for and is woken once, when all of it is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from bytescheduler.core.plan import Span
from bytescheduler.exceptions import TransportClosedError

__all__ = ["Ledger"]


class _Waiter:
    """A thread that sleeps until ``pending`` is empty."""

    __slots__ = ("_gate", "_open", "pending")

    def __init__(self, pending: set[int]) -> None:
        self.pending = pending
        self._open = False
        self._gate = threading.Lock()  # half the cost of an Event
        self._gate.acquire()

    def wake(self) -> None:
        """Called under the ledger's lock."""
        if not self._open:
            self._open = True
            self._gate.release()

    def sleep(self, timeout: float | None) -> None:
        self._gate.acquire(timeout=-1 if timeout is None else timeout)


class Ledger:
    """Rounds posted and elements outstanding, by parameter.

    Args:
        slots: elements of each parameter's slot.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self._slots = tuple(slots)
        self._outstanding = [0] * len(slots)
        self._in_flight = 0  # chunks
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._error: BaseException | None = None
        self._last_words: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """Why the exchange failed, if it did."""
        return self._error

    def post(
        self, parameters: Iterable[int], on_returned: Callable[[], None] | None = None
    ) -> None:
        """Begin a round of ``parameters``; they must have returned from the one before.

        ``on_returned`` is called once for each, from the thread that completes its last chunk, or
        from the one that reports a failure: look at ``error`` in it.
        """
        with self._lock:
            self.raise_if_failed()
            for parameter in parameters:
                if self._outstanding[parameter]:
                    raise RuntimeError(f"parameter {parameter} was posted while it is in flight")
                self._outstanding[parameter] = self._slots[parameter]
                if on_returned is not None:
                    self._callbacks[parameter] = on_returned

    def start(self) -> None:
        """Count a chunk that is handed to the transport."""
        with self._lock:
            self._in_flight += 1

    def complete(self, spans: Iterable[Span]) -> None:
        """Count the elements of a completed chunk; wake who waits for what is now whole."""
        callbacks: list[Callable[[], None]] = []
        with self._lock:
            self._in_flight -= 1
            for parameter, elements in spans:
                self._outstanding[parameter] -= elements
                if not self._outstanding[parameter]:
                    self._wake(parameter)
                    callback = self._callbacks.pop(parameter, None)
                    if callback is not None:
                        callbacks.append(callback)
            if self._last_words is not None and not self._in_flight:
                self._set_error(self._last_words)
        for callback in callbacks:
            callback()

    def returned(self, parameter: int) -> bool:
        """Whether nothing of ``parameter`` is in flight."""
        return not self._outstanding[parameter]

    def wait_returned(self, parameters: Iterable[int], timeout: float | None = None) -> bool:
        """Block until all ``parameters`` have returned; False when ``timeout`` seconds pass first.

        Raises:
            TransportError: the exchange failed or was closed.
        """
        with self._lock:
            pending = {index for index in parameters if self._outstanding[index]}
            if not pending:
                return True
            self.raise_if_failed()
            waiter = _Waiter(pending)
            self._waiters.append(waiter)
        try:
            waiter.sleep(timeout)
        finally:
            with self._lock:
                self._waiters.remove(waiter)
        if pending:
            self.raise_if_failed()
        return not pending

    def retire(self, error: BaseException) -> None:
        """Nothing will be started any more: ``fail`` once the chunks in flight have arrived."""
        with self._lock:
            self._last_words = error
            waiting = self._in_flight > 0
        if not waiting:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Make every present and later wait raise ``error``; the first one counts."""
        with self._lock:
            self._set_error(error)
            callbacks = list(self._callbacks.values())
            self._callbacks.clear()
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """Make every present and later wait raise TransportClosedError."""
        self.fail(TransportClosedError("the exchange was closed"))

    def raise_if_failed(self) -> None:
        """Raise why the exchange failed, if it did."""
        if self._error is not None:
            raise self._error

    def _set_error(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        for waiter in self._waiters:
            waiter.wake()

    def _wake(self, parameter: int) -> None:
        for waiter in self._waiters:
            if parameter in waiter.pending:
                waiter.pending.discard(parameter)
                if not waiter.pending:
                    waiter.wake()

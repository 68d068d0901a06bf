"""Who is still there: servers, workers and the scheduler of a parameter-server job.

ps-lite says nothing when a process dies; pushes stay unanswered for ever. So a thread asks, once a
beat, through the engine itself:

* **Servers** answer a pull at once, whatever the other workers do.
* **Workers** each own a *register* on a server. A ``dist_sync`` server counts pushes, not senders,
  so a worker that pushes its register as often as there are workers writes it alone: a growing
  number, and which of its transports it has closed. The others pull it.
* **The scheduler** listens on the address that every process was given. (Its own heartbeats would
  need a switch that is read before MXNet connects, in all processes.)

Who is silent for ``timeout`` seconds while no chunk comes back either is lost: on a slow link,
answers wait behind gradients, and a chunk that has come back needed everybody.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from bytescheduler.exceptions import PeerLostError
from bytescheduler.transports._kvstore_engine import Store, zeros
from bytescheduler.transports._kvstore_keys import STRIPES

__all__ = ["REGISTER_LENGTH", "Watch"]

REGISTER_LENGTH: Final = 1 + STRIPES  # beats, and how often a transport on each stripe was closed
_WORKERS_PER_SECOND: Final = 32  # registers that one worker reads and writes
_URGENT: Final = 1 << 30


class Watch:
    """Asks once a beat; reports the first loss, then ends.

    Args:
        registers: each worker's key, by rank.
        probes: a key on each server.
        scheduler: its host and port.
        timeout: seconds of silence that count as a loss.
        on_beat: called once a beat.
        on_lost: called once; both from this class's thread.
        pushes: of a key after which a server answers.

    Attributes:
        closed: how often this worker has closed a transport on each stripe.
    """

    def __init__(
        self,
        store: Store,
        registers: Sequence[int],
        probes: Sequence[int],
        scheduler: tuple[str, int],
        timeout: float,
        on_beat: Callable[[], None],
        on_lost: Callable[[PeerLostError], None],
        pushes: int,
    ) -> None:
        self.closed = [0] * STRIPES
        self._store = store
        self._scheduler = scheduler
        self._refusals = 0
        self._timeout = timeout
        self._on_beat = on_beat
        self._on_lost = on_lost
        self._interval = max(1.0, store.workers / _WORKERS_PER_SECOND)
        self._servers = [_Question(store, key) for key in probes]
        self._workers = {
            rank: _Question(store, key) for rank, key in enumerate(registers) if rank != store.rank
        }
        self._register = _Register(store, registers[store.rank], pushes)
        self._last_chunk = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"bytescheduler-watch-{store.rank}", daemon=True
        )

    def start(self) -> None:
        """Begin to ask; further calls do nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def chunk_completed(self) -> None:
        """Everybody took part in something just now."""
        self._last_chunk = time.monotonic()

    def closed_by(self, stripe: int) -> dict[int, int]:
        """How often each other worker has closed a transport on ``stripe``, by rank."""
        return {rank: int(question.value[1 + stripe]) for rank, question in self._workers.items()}

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._end.wait(self._interval):
            now = time.monotonic()
            if now - before > self._interval + self._timeout / 2:
                self._forgive(now)  # this process was stopped, not the others
            before = now
            self._on_beat()
            loss = self._loss(now)
            if loss is not None:
                self._on_lost(loss)
                return
            self._ask()

    def _ask(self) -> None:
        self._call_scheduler()
        self._register.beat(self.closed)
        for question in (*self._servers, *self._workers.values()):
            question.ask()

    def _call_scheduler(self) -> None:
        try:
            socket.create_connection(self._scheduler, timeout=self._timeout / 2).close()
        except OSError:
            self._refusals += 1
        else:
            self._refusals = 0

    def _forgive(self, now: float) -> None:
        for question in (*self._servers, *self._workers.values()):
            question.answered = question.changed = now

    def _loss(self, now: float) -> PeerLostError | None:
        if self._refusals > 1:
            return self._error("the scheduler at {}:{} is gone".format(*self._scheduler))
        if now - self._last_chunk < self._timeout:
            return None
        silent = f"does not answer any more (for {self._timeout:g} s)"
        for number, question in enumerate(self._servers):
            if now - question.answered > self._timeout:
                return self._error(f"server {number} of {len(self._servers)} {silent}")
        for rank, question in self._workers.items():
            if now - question.changed > self._timeout:
                return self._error(f"worker {rank} of {self._store.workers} {silent}", (rank,))
        return None

    def _error(self, what: str, ranks: Sequence[int] = ()) -> PeerLostError:
        return PeerLostError(
            f"rank {self._store.rank}: {what}; this job cannot go on, start it again", ranks
        )


class _Register:
    """This worker's own register."""

    def __init__(self, store: Store, key: int, pushes: int) -> None:
        self._store = store
        self._key = key
        self._pushes = pushes
        self._value = zeros(REGISTER_LENGTH)
        self._array = store.engine.array(self._value)
        self._zeros = store.engine.array(zeros(REGISTER_LENGTH))
        self._beats = 0
        self._written = True

    def beat(self, closed: Sequence[int]) -> None:
        """Write the next value, if the last one was answered."""
        if not self._written:
            return
        self._written = False
        self._beats += 1
        self._value[:] = self._beats, *closed
        for _ in range(self._pushes - 1):
            self._store.push(self._key, self._zeros, _URGENT)
        self._store.push(self._key, self._array, _URGENT)
        self._store.engine.when_ready(self._answered, written=(self._array, self._zeros))

    def _answered(self) -> None:
        self._written = True


class _Question:
    """A key that is pulled again and again.

    Attributes:
        value: what was pulled last.
        answered, changed: when a pull was last answered, and with another value than before.
    """

    def __init__(self, store: Store, key: int) -> None:
        self._store = store
        self._key = key
        self._buffer = zeros(REGISTER_LENGTH)
        self._array: Any = store.engine.array(self._buffer)
        self._open = False
        self.value: tuple[float, ...] = (0.0,) * REGISTER_LENGTH
        self.answered = self.changed = time.monotonic()

    def ask(self) -> None:
        """Pull, unless the last pull is still open."""
        if self._open:
            return
        self._open = True
        self._store.pull(self._key, self._array, _URGENT)
        self._store.engine.when_ready(self._took, read=(self._array,))

    def _took(self) -> None:
        self.answered = time.monotonic()
        value = tuple(float(number) for number in self._buffer)
        if value != self.value:
            self.value, self.changed = value, self.answered
        self._open = False

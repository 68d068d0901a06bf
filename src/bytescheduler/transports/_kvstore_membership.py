"""This process's membership in a parameter-server job.

ps-lite connects a process once, whatever it then does; so there is one membership per process, and
every transport of the process shares it. It joins, watches over the others, gives each transport a
stripe of keys, and at the interpreter's exit leaves in order: when everybody has closed, and not
before, since MXNet's servers stop when worker 0 leaves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any, Final, Protocol

from bytescheduler import _mxnet_import
from bytescheduler._dmlc import require_variables
from bytescheduler.exceptions import (
    ConfigurationError,
    PeerLostError,
    TransportError,
    UsageError,
)
from bytescheduler.transports._kvstore_channel import LENGTH, RING
from bytescheduler.transports._kvstore_engine import Engine, Store, zeros
from bytescheduler.transports._kvstore_keys import STRIPES, KeySpace
from bytescheduler.transports._kvstore_rendezvous import create_kvstore
from bytescheduler.transports._kvstore_sharing import BLOCKS, SMALL
from bytescheduler.transports._kvstore_watch import REGISTER_LENGTH, Watch

__all__ = ["ENV_PEER_TIMEOUT", "Member", "Membership", "Stripe", "membership"]

ENV_PEER_TIMEOUT: Final = "BYTESCHEDULER_PEER_TIMEOUT"
DEFAULT_PEER_TIMEOUT: Final = 6.0  # seconds
LEFT_TIMEOUT: Final = 2.0  # seconds that a chunk may wait for a worker that has closed
REUSE_TIMEOUT: Final = 30.0  # seconds that a new transport waits for an old one on its stripe
FREE_TIMEOUT: Final = 60.0  # seconds for MXNet to shut down at exit


class Member(Protocol):
    """What the membership needs of a transport."""

    stripe: Stripe

    def waiting_since(self) -> float | None:
        """When the oldest chunk in flight was started (``time.monotonic``), or None."""

    def fail(self, error: TransportError) -> None:
        """The job is lost."""

    def close(self) -> None:
        """The process ends."""


class Stripe:
    """The keys of one transport at a time.

    Attributes:
        number: below ``STRIPES``.
        opened: how many transports have used it so far.
        ring, blocks, small: keys of announcements and set-up messages.
        drained: set when the present transport's last messages were answered.
    """

    def __init__(self, number: int, servers: int) -> None:
        self.number = number
        self.keys = KeySpace(servers, number)
        self.opened = 0
        self.ring = [self._reserve(slot) for slot in range(RING)]
        self.blocks = [self._reserve(block) for block in range(len(BLOCKS))]
        self.small = self._reserve(0)
        self.drained = threading.Event()
        self.drained.set()
        self.member: Member | None = None

    def fixed(self) -> dict[int, int]:
        """Elements of the keys that exist from the start, by key."""
        lengths = (*[LENGTH] * RING, *BLOCKS, SMALL)
        return dict(zip((*self.ring, *self.blocks, self.small), lengths, strict=True))

    def _reserve(self, number: int) -> int:
        return self.keys.reserve(number % self.keys.servers).number


class Membership:
    """Joins the job; see ``membership``.

    Args:
        kvstore: the user's store, or None to make one.
        timeout: seconds of silence after which somebody counts as lost.
    """

    def __init__(self, kvstore: Any, timeout: float) -> None:
        engine = Engine()
        job = require_variables(os.environ, role="worker")
        kvstore = create_kvstore("dist_sync", job) if kvstore is None else kvstore
        self.store = Store(engine, kvstore)
        self.kind = str(kvstore.type)
        self.servers = job.servers
        self.error: TransportError | None = None
        self._turn = 0
        self._stripes: list[Stripe | None] = [None] * STRIPES
        self._failed = threading.Event()
        self.watch = self._watch((job.host, job.port), timeout)
        if "async" not in self.kind:
            self.watch.start()  # else when the servers have what they need to take a push
        _mxnet_import.before_exit(self._farewell)

    def open(self, member: Member) -> Stripe:
        """Collective: give a new transport its stripe.

        Raises:
            UsageError: too many are open.
            TransportError: the job was lost before.
        """
        if self.error is not None:
            raise self.error
        number = self._turn % STRIPES
        stripe = self._stripes[number]
        if stripe is None:
            stripe = self._stripes[number] = Stripe(number, self.servers)
            self.create(stripe.fixed())
        elif stripe.member is not None or not stripe.drained.wait(REUSE_TIMEOUT):
            raise UsageError(
                f"at most {STRIPES} kvstore transports may be open at once in a process; close "
                "one first, on every worker"
            )
        self._turn += 1
        stripe.opened += 1
        stripe.drained.clear()
        stripe.member = member
        return stripe

    def close(self, member: Member) -> None:
        """A transport was closed on this worker."""
        stripe = member.stripe
        stripe.member = None
        self.watch.closed[stripe.number] = stripe.opened

    def create(self, lengths: dict[int, int]) -> None:
        """Collective, blocking: make keys of so many float32 zeros."""
        arrays = [self.store.engine.array(zeros(length)) for length in lengths.values()]
        self.store.create(list(lengths), arrays)

    def fail(self, error: TransportError) -> None:
        """The job is lost for every transport of this process."""
        if self.error is None:
            self.error = error
        _mxnet_import.mark_broken()
        self._failed.set()
        for member in self._members():
            member.fail(error)
        for stripe in filter(None, self._stripes):
            stripe.drained.set()

    def _watch(self, scheduler: tuple[str, int], timeout: float) -> Watch:
        keys = KeySpace(self.servers)
        registers = [keys.reserve(rank % self.servers).number for rank in range(self.store.workers)]
        probes = [keys.reserve(server).number for server in range(self.servers)]
        self.create(dict.fromkeys([*registers, *probes], REGISTER_LENGTH))
        return Watch(
            self.store,
            registers,
            probes,
            scheduler,
            timeout,
            self._find_leavers,
            self.fail,
            pushes=1 if "async" in self.kind else self.store.workers,
        )

    def _find_leavers(self) -> None:
        for member in self._members():
            since, stripe = member.waiting_since(), member.stripe
            if since is None or time.monotonic() - since < LEFT_TIMEOUT:
                continue
            for rank, closed in self.watch.closed_by(stripe.number).items():
                if closed >= stripe.opened:
                    said = f"rank {self.store.rank}: rank {rank} ended its gradient exchange"
                    member.fail(PeerLostError(said, (rank,)))

    def _members(self) -> list[Member]:
        return [stripe.member for stripe in self._stripes if stripe and stripe.member]

    def _farewell(self) -> bool:
        for member in self._members():
            member.close()
        for stripe in filter(None, self._stripes):
            stripe.drained.wait()
        if not self._meet():
            return False
        self.watch.stop()
        return self._free()

    def _meet(self) -> bool:
        """Wait until all workers are here, or the job is lost."""
        over = threading.Event()

        def meet() -> None:
            if self.error is None:
                self.store.barrier()
            over.set()

        def give_up() -> None:
            self._failed.wait()
            over.set()

        for wait in (meet, give_up):
            threading.Thread(target=wait, name="bytescheduler-leave", daemon=True).start()
        over.wait()
        return self.error is None

    def _free(self) -> bool:
        """Shut MXNet's store down, whoever made it: our references would keep it past the exit."""
        freeing = threading.Thread(target=self.store.free, name="bytescheduler-free", daemon=True)
        freeing.start()
        freeing.join(FREE_TIMEOUT)
        return not freeing.is_alive()


_present: Membership | None = None


def membership(kvstore: Any = None, peer_timeout: float | None = None) -> Membership:
    """Return this process's membership; the first call joins, collectively.

    Raises:
        ConfigurationError: a ``DMLC_*`` variable is missing or wrong, or another store is in use.
    """
    global _present
    timeout = _peer_timeout(peer_timeout)
    if _present is None:
        _present = Membership(kvstore, timeout)
    elif kvstore is not None and kvstore is not _present.store.kvstore:
        raise ConfigurationError(
            "all kvstore transports of a process must share one KVStore, got a second one; MXNet "
            "connects a process to the servers once, so pass the first, or none"
        )
    return _present


def _peer_timeout(given: float | None) -> float:
    text = os.environ.get(ENV_PEER_TIMEOUT) or str(DEFAULT_PEER_TIMEOUT)
    seconds = given
    if seconds is None:
        with contextlib.suppress(ValueError):
            seconds = float(text)
    if seconds is None or not seconds >= 2:
        raise ConfigurationError(
            f"{ENV_PEER_TIMEOUT} must be at least 2 (seconds without a sign of life), got "
            f"{text if given is None else given!r}; leave it out for {DEFAULT_PEER_TIMEOUT:g}"
        )
    return seconds

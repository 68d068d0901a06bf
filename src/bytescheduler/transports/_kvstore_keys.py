"""Which key, and so which server, each piece of a chunk gets.

MXNet sends an integer key to server ``(key * 9973) % servers``, and arrays above a bound to all of
them. Here a chunk is split into pieces of at most ``PIECE_SIZE`` bytes, all below that bound, and
each piece takes a key of the server that carries the fewest bytes so far, then the fewest pieces,
as Optimus assigns parameter blocks. So large chunks spread by bytes and small ones by count.

A key cannot be deleted and its size cannot change. Keys are therefore taken again by the next cut
where the size fits: all partition sizes that are multiples of ``PIECE_SIZE`` share one set, and the
servers' memory stays bounded while a tuner tries sizes. Every rank allocates in the same order, so
that all agree without a message; for that each transport of a process has a *stripe* of keys to
itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

from bytescheduler.exceptions import TransportError

__all__ = ["PIECE_SIZE", "STRIPES", "Key", "KeySpace", "piece_lengths"]

PIECE_SIZE: Final = 1 << 20  # bytes
STRIPES: Final = 8
_FIRST_KEY: Final = 1 << 16  # below: the user's own
_COMMON: Final = 1 << 13  # keys of the job, before the stripes
_HASH: Final = 9973
_LAST_KEY: Final = (1 << 31) // _HASH  # MXNet multiplies in 32 bits


class Key(NamedTuple):
    """A key of the store.

    Attributes:
        number: what MXNet calls the key.
        server: where it lives.
        ordinal: how many keys were allocated up to this one; keys open in this order.
        fresh: whether this allocation made it.
    """

    number: int
    server: int
    ordinal: int
    fresh: bool


class KeySpace:
    """Allocates the keys of one stripe.

    Args:
        servers: how many there are.
        stripe: its number below ``STRIPES``; None for the keys that the whole job shares.

    Attributes:
        load: bytes and pieces on each server in the present cut.
    """

    def __init__(self, servers: int, stripe: int | None = None) -> None:
        self.servers = servers
        self.allocated = 0
        self._range = _range_of(stripe)
        self._numbers = [_keys_of(server, servers, self._range) for server in range(servers)]
        self._known: defaultdict[tuple[int, str, int], list[Key]] = defaultdict(list)
        self.begin_cut()

    def begin_cut(self) -> None:
        """All keys handed out by ``take`` may be taken again."""
        self.load = [(0, 0)] * self.servers  # bytes, pieces
        self._free = {shape: list(keys) for shape, keys in self._known.items()}

    def take(self, elements: int, dtype: str, nbytes: int) -> Key:
        """Return a key for ``elements`` of ``dtype`` on the least loaded server."""
        server = min(range(self.servers), key=lambda index: (*self.load[index], index))
        carried, pieces = self.load[server]
        self.load[server] = (carried + nbytes, pieces + 1)
        shape = (elements, dtype, server)
        free = self._free.get(shape)
        if free:
            return free.pop(0)
        key = self.reserve(server)
        self._known[shape].append(key._replace(fresh=False))
        return key

    def reserve(self, server: int) -> Key:
        """Return a new key on ``server`` that is never taken again."""
        try:
            number = next(self._numbers[server])
        except StopIteration:
            raise TransportError(
                f"a transport may use {len(self._range)} keys (MXNet hashes them in 32 bits), and "
                f"server {server} has none left; use larger partition sizes, or fewer of them"
            ) from None
        self.allocated += 1
        return Key(number, server, self.allocated, fresh=True)


def piece_lengths(elements: int, itemsize: int) -> list[int]:
    """Split ``elements`` into pieces of ``PIECE_SIZE`` bytes; the last may be shorter."""
    step = PIECE_SIZE // itemsize
    whole, rest = divmod(elements, step)
    return [step] * whole + ([rest] if rest else [])


def _range_of(stripe: int | None) -> range:
    first = _FIRST_KEY + _COMMON
    if stripe is None:
        return range(_FIRST_KEY, first)
    width = (_LAST_KEY - first) // STRIPES
    return range(first + stripe * width, first + (stripe + 1) * width)


def _keys_of(server: int, servers: int, numbers: range) -> Iterator[int]:
    return (number for number in numbers if number * _HASH % servers == server)

"""Which parameter server keeps which parameter block.

Optimus' assignment (PAA, EuroSys 2018) balances bytes and requests at once, MXNet's own rule
neither: small blocks go wherever their key hashes to and every large one is cut over all servers.
An exact solution (makespan scheduling) was considered: it is NP-hard and PAA is within one small
block of even on real models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bytescheduler.exceptions import ConfigurationError

__all__ = ["BlockAssignment", "assign_blocks", "assign_blocks_like_mxnet"]

TINY_FRACTION = 0.01
MXNET_LARGE_BLOCK = 1_000_000
MXNET_HASH_PRIME = 9973


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAssignment:
    """Parameters and requests of every server; ``parts[i]`` lists server i's (block, size)."""

    parts: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Parameters on each server."""
        return tuple(sum(size for _, size in server) for server in self.parts)

    @property
    def requests(self) -> int:
        """Requests that a worker sends per exchange, over all servers."""
        return sum(map(len, self.parts))

    @property
    def size_difference(self) -> int:
        """Largest minus smallest number of parameters on a server."""
        return max(self.sizes) - min(self.sizes)

    @property
    def request_difference(self) -> int:
        """Largest minus smallest number of requests on a server."""
        counts = [len(server) for server in self.parts]
        return max(counts) - min(counts)

    @property
    def imbalance(self) -> float:
        """Largest server over the average one (1 is even); it sets the exchange's time."""
        return max(self.sizes) * len(self.parts) / sum(self.sizes)


def assign_blocks(blocks: Sequence[int], servers: int) -> BlockAssignment:
    """Assign blocks by Optimus' rule.

    Blocks in descending size; ``average`` is total / servers. A block under 1 % of the average goes
    to the server with the fewest requests (of those, the one with the fewest parameters). One up to
    the average goes where it fits best, the fullest server that stays within the average, or the
    emptiest if none does. A larger one is cut into average-sized parts, each to the emptiest.

    Args:
        blocks: number of parameters of each block.
        servers: number of parameter servers.

    Raises:
        ConfigurationError: no block, no server or a block without parameters.
    """
    _check(blocks, servers)
    average = sum(blocks) / servers
    parts: list[list[tuple[int, int]]] = [[] for _ in range(servers)]
    sizes = [0] * servers

    def put(server: int, block: int, size: int) -> None:
        parts[server].append((block, size))
        sizes[server] += size

    for block in sorted(range(len(blocks)), key=lambda block: -blocks[block]):
        size = blocks[block]
        if size > average:
            for part in _cut(size, average):
                put(sizes.index(min(sizes)), block, part)
        elif size >= TINY_FRACTION * average:
            put(_best_fit(sizes, size, average), block, size)
        else:
            put(min(range(servers), key=lambda s: (len(parts[s]), sizes[s])), block, size)
    return BlockAssignment(parts=tuple(map(tuple, parts)))


def _best_fit(sizes: Sequence[int], size: int, average: float) -> int:
    fitting = [server for server, used in enumerate(sizes) if used + size <= average]
    if fitting:
        return max(fitting, key=lambda server: sizes[server])
    return min(range(len(sizes)), key=lambda server: sizes[server])


def _cut(size: int, average: float) -> list[int]:
    part = max(1, int(average))
    whole, rest = divmod(size, part)
    return [part] * whole + ([rest] if rest else [])


def assign_blocks_like_mxnet(blocks: Sequence[int], servers: int) -> BlockAssignment:
    """Assign blocks by MXNet's rule: hash small ones by key, cut large ones over all servers.

    Raises:
        ConfigurationError: no block, no server or a block without parameters.
    """
    _check(blocks, servers)
    parts: list[list[tuple[int, int]]] = [[] for _ in range(servers)]
    for block, size in enumerate(blocks):
        if size < MXNET_LARGE_BLOCK or servers == 1:
            parts[block * MXNET_HASH_PRIME % servers].append((block, size))
            continue
        for server in range(servers):
            part = size * (server + 1) // servers - size * server // servers
            parts[server].append((block, part))
    return BlockAssignment(parts=tuple(map(tuple, parts)))


def _check(blocks: Sequence[int], servers: int) -> None:
    if not blocks or min(blocks) < 1 or servers < 1:
        raise ConfigurationError(
            "parameter blocks must be at least one block of at least 1 parameter and one server, "
            f"got {len(blocks)} blocks and {servers} servers"
        )

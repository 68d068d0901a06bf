"""Settings: keyword arguments first, then the environment, then defaults.

All sizes are bytes. Environment variables are read when an optimizer is wrapped, never at import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import Final, Literal, cast, get_args

from bytescheduler.exceptions import ConfigurationError

__all__ = [
    "ENV_CHECK",
    "ENV_CREDIT_SIZE",
    "ENV_MODE",
    "ENV_PARTITION_SIZE",
    "ENV_TRACE",
    "Mode",
    "Settings",
    "format_size",
    "parse_size",
    "resolve_settings",
]

ENV_PARTITION_SIZE: Final = "BYTESCHEDULER_PARTITION_SIZE"
ENV_CREDIT_SIZE: Final = "BYTESCHEDULER_CREDIT_SIZE"
ENV_MODE: Final = "BYTESCHEDULER_MODE"
ENV_TRACE: Final = "BYTESCHEDULER_TRACE"
ENV_CHECK: Final = "BYTESCHEDULER_CHECK"

Mode = Literal["priority", "fifo", "barrier", "auto"]
MODES: Final[tuple[str, ...]] = get_args(Mode)

DEFAULT_PARTITION_SIZE: Final = 1 << 20  # where the bandwidth is not known
DEFAULT_CREDIT_SIZE: Final = 3 << 20
CHUNKS_PER_CREDIT: Final = 3  # enough to keep the wire busy
CHUNK_S: Final = 10e-3  # seconds on the wire that are worth the cost of a message
CHUNKS_PER_MODEL: Final = 2  # at least
PARTITION_LIMITS: Final = 64 << 10, 4 << 20
# One bucket of DistributedDataParallel, and room for two on the wire.
BARRIER_PARTITION_SIZE: Final = 25 << 20
BARRIER_CREDIT_SIZE: Final = 2 * BARRIER_PARTITION_SIZE

_UNITS: Final = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9,
    "k": 2**10, "m": 2**20, "g": 2**30,
    "kib": 2**10, "mib": 2**20, "gib": 2**30,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How gradients are cut and sent.

    Attributes:
        partition_size: bytes per chunk.
        credit_size: bytes in flight at most; at least one chunk. Of no effect under ``barrier``
            over Gloo.
        mode: ``priority`` (forward order, no barrier), ``fifo`` (order of production, no
            barrier), ``barrier`` (order of production, ``step()`` waits) or ``auto`` (measured).
        trace: path of the timeline to write, with ``{rank}`` for the rank; None for none.
    """

    partition_size: int = DEFAULT_PARTITION_SIZE
    credit_size: int = DEFAULT_CREDIT_SIZE
    mode: Mode = "priority"
    trace: str | None = None

    @property
    def growing(self) -> bool:
        """Whether chunks grow from the head of the buffer, as those there are the most urgent."""
        return self.mode in ("priority", "auto")

    def __post_init__(self) -> None:
        for name in ("partition_size", "credit_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigurationError(
                    f"{name} must be a positive number of bytes, got {value!r}; "
                    "pass an int or a text like '4MiB'"
                )
        if self.credit_size < self.partition_size:
            raise ConfigurationError(
                f"credit_size must hold at least one chunk (partition_size = "
                f"{format_size(self.partition_size)}), got {format_size(self.credit_size)}; "
                "raise credit_size or lower partition_size"
            )
        if self.mode not in MODES:
            raise ConfigurationError(
                f"mode must be one of {', '.join(MODES)}, got {self.mode!r}; "
                "leave it out for the default"
            )


def parse_size(value: int | str, *, name: str = "size") -> int:
    """Return ``value`` in bytes: an int, or a text such as ``4MiB``, ``512 KiB``, ``25MB``.

    Raises:
        ConfigurationError: it is not a size, or not positive.
    """
    size: float | None = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match and unit:
            size = float(match[1]) * unit
    elif not isinstance(value, bool):
        size = value
    if size is None or size != int(size) or size <= 0:
        raise ConfigurationError(
            f"{name} must be a positive number of bytes, got {value!r}; "
            "pass an int or a text like '4MiB'"
        )
    return int(size)


def format_size(size: int) -> str:
    """Return ``size`` bytes in the largest binary unit that shows it exactly."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def resolve_settings(
    *,
    partition_size: int | str | None = None,
    credit_size: int | str | None = None,
    mode: str | None = None,
    trace: str | None = None,
    model_bytes: int | None = None,
    bandwidth: float | None = None,
    least_chunks: int = 1,
    tunable: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge keyword arguments, environment and defaults.

    If only one of the two sizes is given, the other follows it (credit = 3 chunks). If none is, see
    ``default_partition``. The mode is ``auto`` by default, but ``priority`` where a size is given:
    who names one wants it kept.

    Args:
        model_bytes: bytes of all gradients of one rank, where known.
        bandwidth: bytes per second between ranks, where known.
        least_chunks: as the transport has it.
        tunable: whether the mode may be ``auto`` without being asked for.

    Raises:
        ConfigurationError: a value breaks a rule; the message names its source.
    """
    env = os.environ if environ is None else environ
    partition = _size(partition_size, env, "partition_size", ENV_PARTITION_SIZE)
    credit = _size(credit_size, env, "credit_size", ENV_CREDIT_SIZE)
    no_sizes = partition is None and credit is None
    mode = mode or env.get(ENV_MODE) or ("auto" if tunable and no_sizes else "priority")
    if no_sizes and mode == "barrier":
        partition, credit = BARRIER_PARTITION_SIZE, BARRIER_CREDIT_SIZE
    if partition is None:
        fitting = default_partition(model_bytes, bandwidth, least_chunks)
        partition = min(fitting, credit or PARTITION_LIMITS[1])
    return Settings(
        partition_size=partition,
        credit_size=credit or CHUNKS_PER_CREDIT * partition,
        mode=cast("Mode", mode),
        trace=trace or env.get(ENV_TRACE) or None,
    )


def default_partition(
    model_bytes: int | None = None, bandwidth: float | None = None, least_chunks: int = 1
) -> int:
    """Bytes per chunk for a start: a power of two that takes about 10 ms on the wire.

    Between 64 KiB and 4 MiB, and at most half of the model, unless all of it takes less than that:
    then it is cut into ``least_chunks``, on most engines not at all. Smaller chunks let urgent ones
    overtake sooner, larger ones cost less; what is best for a job is measured, by ``mode="auto"``.
    """
    low, high = PARTITION_LIMITS
    size = DEFAULT_PARTITION_SIZE
    if bandwidth is not None:
        size = min(max(1 << round(log2(max(1.0, bandwidth * CHUNK_S))), low), high)
    if model_bytes is None:
        return size
    short = bandwidth is not None and model_bytes < bandwidth * CHUNK_S
    pieces = least_chunks if short else max(CHUNKS_PER_MODEL, least_chunks)
    return size if pieces == 1 else max(low, min(size, model_bytes // pieces))


def _size(value: int | str | None, env: Mapping[str, str], name: str, variable: str) -> int | None:
    if value is not None:
        return parse_size(value, name=name)
    text = env.get(variable)
    return parse_size(text, name=variable) if text else None

"""What tuning found, kept in the user's cache directory for the next time.

One small JSON file per key. So writing is one atomic rename, and jobs that end at the same moment
do not lose each other's entries, without a lock (which network file systems do not all honour).
Everything that is read is checked as if a stranger had written it.

Bandwidth is part of the key in octaves: a measured value next time may fall into the neighbouring
bin, so the neighbours are looked at as well. Values within a factor of two of each other are thus
always one network, and those more than a factor of four apart never.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from bytescheduler.core.config import Settings
from bytescheduler.exceptions import ConfigurationError

__all__ = ["Cache", "JobKey", "cache_directory"]

VERSION: Final = 1
MAX_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """What the best settings depend on.

    Attributes:
        signature: digest of names, shapes and dtypes of the model's parameters.
        world_size: number of ranks.
        engine: name of the transport.
        device: kind of device, and its name where it has one.
        bandwidth: measured bytes per second between ranks; None where not measured.
    """

    signature: str
    world_size: int
    engine: str
    device: str
    bandwidth: float | None = None

    def described(self, bandwidth_bin: int | None) -> dict[str, Any]:
        """The key as JSON, in one bin of bandwidth."""
        values = asdict(self)
        del values["bandwidth"]
        return {**values, "bandwidth_bin": bandwidth_bin}

    def bandwidth_bins(self) -> Iterator[int | None]:
        """The bin of this key, then its neighbours."""
        if not self.bandwidth:
            yield None
            return
        middle = round(math.log2(self.bandwidth))
        yield from (middle, middle - 1, middle + 1)


class Cache:
    """Settings by :class:`JobKey`.

    Args:
        directory: where; by default :func:`cache_directory`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = cache_directory() if directory is None else directory

    def load(self, key: JobKey, base: Settings) -> Settings | None:
        """What was found for ``key``, the rest taken from ``base``; None if nothing is known.

        Warns with UserWarning, and goes on as if nothing were known, where the content is not ours.
        """
        for bandwidth_bin in key.bandwidth_bins():
            described = key.described(bandwidth_bin)
            path = self._path(described)
            try:
                return _parse(path.read_bytes(), described, base)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                warnings.warn(
                    f"{path} cannot be used and is ignored ({error}); remove it to silence this",
                    stacklevel=2,
                )
        return None

    def store(self, key: JobKey, settings: Settings, iteration_s: float) -> None:
        """Keep ``settings`` for ``key``; warns with UserWarning where that is not possible."""
        described = key.described(next(key.bandwidth_bins()))
        entry = {
            "version": VERSION,
            "key": described,
            "partition_size": settings.partition_size,
            "credit_size": settings.credit_size,
            "mode": settings.mode,
            "iteration_s": iteration_s,
        }
        path = self._path(described)
        try:
            _write(path, json.dumps(entry, indent=1))
        except OSError as error:
            warnings.warn(
                f"tuned settings cannot be kept for the next run: {error}; "
                "set XDG_CACHE_HOME to a directory that can be written",
                stacklevel=2,
            )

    def _path(self, described: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        return self.directory / f"{digest[:32]}.json"


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """``$XDG_CACHE_HOME/bytescheduler/tuning``, by default under ``~/.cache``."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "bytescheduler" / "tuning"


def _parse(content: bytes, described: dict[str, Any], base: Settings) -> Settings:
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has {len(content)} bytes, more than {MAX_BYTES}")
    entry = json.loads(content)
    if entry["version"] != VERSION or entry["key"] != described:
        raise ValueError("it was written for something else")
    if entry["mode"] == "auto":
        raise ConfigurationError("mode must be one that was found, got 'auto'")
    return replace(
        base,
        partition_size=entry["partition_size"],
        credit_size=entry["credit_size"],
        mode=entry["mode"],
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

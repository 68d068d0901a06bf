"""What an adapter tells ``bytescheduler tune``: one line of JSON per iteration, in a file.

The file is named by the environment, so that no script has to change. Lines are appended and the
file closed each time: whatever happens to the process, the reader finds whole lines and knows how
far it got; nothing has to be closed at the end. A socket was considered; it needs a thread on one
of the two sides.

The first line of a wrapped optimizer says what was wrapped, with which settings; then comes one
line per iteration. Several optimizers in one process (adversarial training) write to one file;
``read`` keeps those with the most bytes of gradients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from bytescheduler.core.config import Settings

__all__ = ["ENV_REPORT", "IterationReport", "Report", "read"]

ENV_REPORT: Final = "BYTESCHEDULER_REPORT"

_numbers = count()


class IterationReport:
    """Writes one job's iterations; on rank 0, in the training thread.

    Args:
        path: file to append to.
        settings: the ones in force.
        total_bytes: bytes of all gradients of one rank.
        world_size: number of ranks.
    """

    def __init__(
        self, path: str | Path, *, settings: Settings, total_bytes: int, world_size: int
    ) -> None:
        self._path = Path(path)
        self._number = next(_numbers)
        self._last: float | None = None
        self._append(
            {
                "wrapped": self._number,
                "total_bytes": total_bytes,
                "world_size": world_size,
                "partition_size": settings.partition_size,
                "credit_size": settings.credit_size,
                "mode": settings.mode,
            }
        )

    def step(self, now: float) -> None:
        """An iteration ended at ``now`` (``perf_counter`` seconds)."""
        if self._last is not None:
            self._append({"of": self._number, "seconds": now - self._last})
        self._last = now

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was read from a file of reports.

    Attributes:
        settings: those that the job really used.
        total_bytes: bytes of all gradients of one rank.
        world_size: number of ranks.
        seconds: of each iteration.
    """

    settings: Settings
    total_bytes: int
    world_size: int
    seconds: tuple[float, ...]


def read(path: str | Path) -> Report | None:
    """The report in ``path``; None when no optimizer has been wrapped yet."""
    lines = list(_lines(Path(path)))
    wrapped = [line for line in lines if "wrapped" in line]
    if not wrapped:
        return None
    largest = max(line["total_bytes"] for line in wrapped)
    kept = [line for line in wrapped if line["total_bytes"] == largest]
    numbers = {line["wrapped"] for line in kept}
    return Report(
        settings=Settings(
            **{key: kept[0][key] for key in ("partition_size", "credit_size", "mode")}
        ),
        total_bytes=largest,
        world_size=kept[0]["world_size"],
        seconds=tuple(line["seconds"] for line in lines if line.get("of") in numbers),
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        yield json.loads(line)

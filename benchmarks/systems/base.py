"""The contract of a system under test: one file, one class.

Order of calls: ``missing`` and ``sweep`` in the command that drives the lab; then in every worker,
any number of times, ``open`` and, on what it returns, ``iterate`` as often as the lab wants and
``close`` once. Nothing may be left running after ``close``: other systems use the same process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from benchmarks.job import Job

Settings = dict[str, Any]


class Session(ABC):
    """One system at work on one job, in one worker."""

    @abstractmethod
    def iterate(self) -> None:
        """One iteration, as a user's loop has it."""

    def settle(self) -> list[dict[str, Any]]:
        """Iterate until what later sessions of the same job will know is learnt.

        Returns:
            Of each iteration ``at``, its end (seconds of ``time.time``), and the ``settings`` then.
        """
        return []

    @abstractmethod
    def close(self) -> None:
        """Finish what is in flight and undo what ``open`` did."""


class System(ABC):
    """A way to exchange gradients.

    Attributes:
        name: what ``--systems`` calls it.
        engine: which worker processes it runs in; see ``benchmarks.engines``.
        learns: whether a session must ``settle`` before others are measured.
    """

    name: ClassVar[str]
    engine: ClassVar[str]
    learns: ClassVar[bool] = False

    @abstractmethod
    def missing(self) -> str | None:
        """What is not installed, or None."""

    @abstractmethod
    def sweep(self, job: Job) -> list[Settings]:
        """Settings to try; the fastest counts. The first is the one to take without a sweep."""

    def environment(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """Variables that must be set before the engine starts; each setting has own processes."""
        return {}

    @abstractmethod
    def open(self, job: Job, settings: Mapping[str, Any]) -> Session:
        """Make the job's model and wrap it (collective)."""

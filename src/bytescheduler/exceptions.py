"""Every error that the package raises, as one small tree.

::

    ByteSchedulerError
    ├── ConfigurationError (also ValueError)     a setting breaks a rule
    ├── UsageError (also RuntimeError)           a call that cannot work here or now
    │   ├── RankMismatchError                    ranks disagree (model, settings, steps)
    │   └── StaleParameterError                  a parameter was used before it was current
    ├── MissingDependencyError (also ImportError)  an optional package is not installed
    └── TransportError (also RuntimeError)       the engine failed
        ├── PeerLostError                        another rank died or left
        └── TransportClosedError                 used after close(), or closed while waiting

Errors of other packages are translated at the boundary and kept as ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ByteSchedulerError",
    "ConfigurationError",
    "MissingDependencyError",
    "PeerLostError",
    "RankMismatchError",
    "StaleParameterError",
    "TransportClosedError",
    "TransportError",
    "UsageError",
]


class ByteSchedulerError(Exception):
    """Base class of all errors of this package."""


class ConfigurationError(ByteSchedulerError, ValueError):
    """A setting breaks a rule; the message states the rule, the value and the remedy."""


class UsageError(ByteSchedulerError, RuntimeError):
    """A call that cannot work in the present state; nothing was changed."""


class RankMismatchError(UsageError):
    """Ranks disagree on something that must be equal on all of them."""


class StaleParameterError(UsageError):
    """A parameter was used although its update had not been applied."""


class MissingDependencyError(ByteSchedulerError, ImportError):
    """An optional dependency is missing; the message names the extra to install."""


class TransportError(ByteSchedulerError, RuntimeError):
    """The communication engine reported a failure."""


class PeerLostError(TransportError):
    """One or more other ranks died or left.

    Attributes:
        ranks: the ranks that do not answer any more; empty if the engine cannot tell.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TransportClosedError(TransportError):
    """The transport was closed, perhaps while a call was waiting in it."""

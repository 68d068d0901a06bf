"""The one place that imports MXNet, and closes the gaps between MXNet 1.9.1 and today's NumPy.

MXNet 1.9.1 reads ``numpy.bool`` while it is imported, and in three of its modules also later;
NumPy 1.24 removed that name. The name is lent to NumPy for the time of the import only. The three
modules keep a view of NumPy of their own that has it, so users' NumPy is as they know it.

Importing MXNet in a process whose ``DMLC_ROLE`` is ``server`` or ``scheduler`` serves until the job
ends and then leaves the process; the variables are checked before, so a wrong one is named instead
of aborting in C++.

``mark_broken`` is for a process whose parameter-server job has failed. MXNet would wait in its exit
handler and its destructors for answers that never come; such a process ends with status 1 when the
interpreter has run the exit handlers of everybody else. MXNet's own handler is called from ours,
when the process has left its job in order.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import numpy as np

from bytescheduler._dmlc import ROLE, require_variables
from bytescheduler._imports import require

__all__ = ["before_exit", "load", "mark_broken"]

_READ_LATER: Final = (
    "mxnet.numpy.multiarray",
    "mxnet.ndarray.numpy._op",
    "mxnet.symbol.numpy._symbol",
)
_broken = False
_registered: list[Callable[[], None]] = []  # MXNet's exit handler, once it is imported
_farewells: list[Callable[[], bool]] = []


def load() -> Any:
    """Return the ``mxnet`` module.

    Raises:
        MissingDependencyError: MXNet is not installed.
        ConfigurationError: a ``DMLC_*`` variable is missing or wrong; only where ``DMLC_ROLE`` says
            that this process is part of a job.
        SystemExit: this process was a server or a scheduler, and its job has ended.
    """
    if _registered:
        return sys.modules["mxnet"]
    if os.environ.get(ROLE):
        require_variables(os.environ)
    atexit.register(_leave)  # first, so that it runs after everybody else's
    with _lent_names():
        mxnet = require("mxnet", extra="mxnet")
    for name in _READ_LATER:
        module = sys.modules.get(name)
        if module is not None:
            vars(module)["_np"] = _NumpyWithBool()
    _take_over_exit(mxnet)
    return mxnet


def mark_broken() -> None:
    """End this process with status 1 at its exit: MXNet cannot be shut down in order any more."""
    global _broken
    _broken = True


def before_exit(farewell: Callable[[], bool]) -> None:
    """Call ``farewell`` when the interpreter exits; False from it means ``mark_broken``."""
    _farewells.append(farewell)


def _leave() -> None:
    outcomes = [farewell() for farewell in _farewells]
    if all(outcomes) and not _broken:
        for shut_down in _registered:
            shut_down()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _take_over_exit(mxnet: Any) -> None:
    atexit.unregister(mxnet.base._notify_shutdown)
    _registered.append(mxnet.base._notify_shutdown)


@contextmanager
def _lent_names() -> Generator[None]:
    if "bool" in vars(np):
        yield
        return
    setattr(np, "bool", bool)  # noqa: B010  (not an attribute that type checkers know)
    try:
        yield
    finally:
        delattr(np, "bool")


class _NumpyWithBool(ModuleType):
    """NumPy, and the alias that it had when MXNet 1.9.1 was written."""

    bool = bool

    def __init__(self) -> None:
        super().__init__(np.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

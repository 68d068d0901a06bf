"""Optional dependencies that explain themselves when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from bytescheduler.exceptions import MissingDependencyError

__all__ = ["require"]


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``module`` and return it.

    Raises:
        MissingDependencyError: it is not installed; names ``bytescheduler[extra]``.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise MissingDependencyError(
            f"{module} is not installed; run: pip install 'bytescheduler[{extra}]'"
        ) from error

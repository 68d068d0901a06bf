"""Engines that move chunks, one file each; see ``base`` for the contract.

``create(name, **options)`` finds a transport by the name in the entry-point group
``bytescheduler.transports``, so third parties register theirs in their own package.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.transports.base import MESSAGE_LIMIT, Done, Transport

__all__ = ["MESSAGE_LIMIT", "Done", "Transport", "create", "name_of"]

GROUP = "bytescheduler.transports"


def create(name: str, **options: Any) -> Transport:
    """Open the transport registered as ``name`` with its own options.

    Raises:
        ConfigurationError: no installed package registers that name.
        MissingDependencyError: its engine is not installed.
    """
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in known:
        raise ConfigurationError(
            f"transport must be one of {', '.join(sorted(known))}, got {name!r}; "
            f"a package that brings another registers it in the entry-point group {GROUP!r}"
        )
    return known[name].load()(**options)


def name_of(transport: Transport) -> str:
    """The name that the class of ``transport`` is registered as; its class name if it is not."""
    for entry in entry_points(group=GROUP):
        module = sys.modules.get(entry.module)  # that of an instance has been imported
        if getattr(module, entry.attr, None) is type(transport):
            return entry.name
    return type(transport).__name__

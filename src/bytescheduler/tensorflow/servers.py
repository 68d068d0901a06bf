"""MXNet beside TensorFlow: whoever is imported first decides whether parameter servers work.

Both bring a protobuf of their own. MXNet's connection to its servers crashes the process (seen with
1.9.1 and TensorFlow 2.21) when MXNet is imported after TensorFlow; in the other order both work. So
in a process of a parameter-server job, MXNet is imported here, before TensorFlow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from bytescheduler._mxnet_import import load
from bytescheduler.exceptions import UsageError

__all__ = ["load_first", "refuse_wrong_order"]


def load_first() -> None:
    """Import MXNet if this process works for a parameter-server job and TensorFlow is not there."""
    if os.environ.get("DMLC_ROLE") == "worker" and "tensorflow" not in sys.modules:
        load()


def refuse_wrong_order(imported: Iterable[str] | None = None) -> None:
    """Raise UsageError where a connection to the servers would crash.

    Args:
        imported: names of modules in the order of their import; ``sys.modules`` by default.
    """
    order = list(sys.modules if imported is None else imported)
    if "mxnet" not in order or order.index("mxnet") > order.index("tensorflow"):
        raise UsageError(
            "with parameter servers MXNet must be imported before TensorFlow, or it crashes; set "
            "the DMLC_* variables and import bytescheduler.tensorflow before tensorflow and keras"
        )

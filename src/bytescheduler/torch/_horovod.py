"""Takes over an optimizer that ``hvd.DistributedOptimizer`` has wrapped already.

Horovod makes a class on the fly that derives from the user's optimizer, registers a hook on the
autograd node of every parameter, and keeps these nodes alive itself. Here the user's optimizer is
made visible again, over the very same parameter groups and state, and the nodes are let go, so
that Horovod's hooks end with them. No method of Horovod's is replaced.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

from torch.optim import Optimizer

from bytescheduler.exceptions import UsageError

__all__ = ["unwrap_horovod"]

_MODULE = "horovod.torch.optimizer"

_log = logging.getLogger("bytescheduler")


def unwrap_horovod(optimizer: Optimizer) -> Optimizer | None:
    """Return the user's optimizer inside of ``hvd.DistributedOptimizer``, freed of Horovod's hooks.

    It shares groups and state with ``optimizer``, which must not be used any more. Returns None if
    Horovod did not wrap it. Says in one line of the log, on rank 0, what was taken over.

    Raises:
        UsageError: it was wrapped with options whose results we would change: a reduction other
            than the average, or accumulation by ``backward_passes_per_step``; nothing was changed.
    """
    if type(optimizer).__module__ != _MODULE:
        return None
    wrapped: Any = optimizer
    _refuse_other_results(wrapped)
    plain = _as_base_class(optimizer)
    wrapped._handles.clear()
    wrapped._requires_update.clear()
    wrapped._grad_accs.clear()  # the only references to the nodes that carry Horovod's hooks
    _announce(wrapped, plain)
    return plain


def _refuse_other_results(wrapped: Any) -> None:
    from horovod.torch import Average

    if getattr(wrapped, "op", None) != Average:
        raise UsageError(
            "the reduction of hvd.DistributedOptimizer must be hvd.Average, got another; pass "
            "op=hvd.Average, or keep Horovod's optimizer for Sum and Adasum"
        )
    passes = wrapped.backward_passes_per_step
    if passes != 1:
        raise UsageError(
            f"backward_passes_per_step of hvd.DistributedOptimizer must be 1, got {passes}; put "
            "all but the last backward of a step under ScheduledOptimizer.no_sync()"
        )


def _as_base_class(optimizer: Optimizer) -> Optimizer:
    base: Any = type(optimizer).__mro__[1]
    plain: Optimizer = base.__new__(base)
    own = {"_compression", "_parameter_names", "_allreduce_delay", "_handles", "_grad_accs"}
    own |= {"_requires_update", "_synchronized", "_should_synchronize", "_groups", "_p_to_group"}
    own |= {"_group_counts", "backward_passes_per_step", "op", "gradient_predivide_factor"}
    own |= {"sparse_as_dense", "process_set"}
    plain.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in own})
    # Scripts that clip call this between synchronize() and step(); there is nothing to skip here.
    plain.__dict__["skip_synchronize"] = nullcontext
    return plain


def _announce(wrapped: Any, plain: Optimizer) -> None:
    from horovod.torch import Compression, rank

    if rank() != 0:
        return
    dropped: list[str] = []
    if wrapped._compression is not Compression.none:
        dropped.append("compression (gradients are sent as they are)")
    if wrapped._groups is not None:
        dropped.append("groups (chunks take their place)")
    _log.warning(
        "took over %s with %d parameters from hvd.DistributedOptimizer%s",
        type(plain).__name__,
        sum(len(group["params"]) for group in plain.param_groups),
        f"; without its {' and '.join(dropped)}" if dropped else "",
    )

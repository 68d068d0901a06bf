"""The one class that a PyTorch user needs."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bytescheduler import transports
from bytescheduler.core import Settings, TraceRecorder, resolve_settings
from bytescheduler.core.config import ENV_CHECK
from bytescheduler.core.plan import ALIGNMENT
from bytescheduler.exceptions import ConfigurationError, UsageError
from bytescheduler.torch._horovod import unwrap_horovod
from bytescheduler.torch.agreement import broadcast_optimizer_state
from bytescheduler.torch.check import CheckMode
from bytescheduler.torch.proposal import Proposal, agree_on
from bytescheduler.torch.session import Session
from bytescheduler.torch.tuner import broadcast_timed, tuner_of
from bytescheduler.transports.base import Transport
from bytescheduler.tuning import settings_of_rank_0

__all__ = ["ScheduledOptimizer"]

_wrapped: weakref.WeakKeyDictionary[Optimizer, weakref.ref[ScheduledOptimizer]] = (
    weakref.WeakKeyDictionary()
)


_wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[ScheduledOptimizer]] = (
    weakref.WeakKeyDictionary()
)


class ScheduledOptimizer(Optimizer):
    """Wraps ``optimizer`` so that gradients of ``model`` are averaged over ranks in the order in
    which the next forward pass needs them, overlapped with backward *and* forward.

    The training loop stays as it is, and so do its results. ``step()`` returns at once; a
    parameter's update is applied, in the thread that uses it, by the wrapped optimizer, when its
    module's forward begins or when anything else uses it first. Reading ``p.grad`` between backward
    and step (clipping, AMP) gives the average over ranks. Passing a closure, step hooks, or an
    optimizer whose parameters depend on each other make ``step()`` wait for everything.

    Args:
        optimizer: any ``torch.optim.Optimizer`` over parameters of ``model``; one that
            ``hvd.DistributedOptimizer`` wrapped is taken over.
        model: the module whose forward and backward are run; not wrapped in
            DistributedDataParallel. Parameters and buffers are broadcast from rank 0, and
            optimizer state if rank 0 has any.
        group: process group of ``torch.distributed``; the default group if None.
        partition_size: bytes per chunk, as int or text (``"4MiB"``); by default what takes
            about 10 ms between ranks, between 64 KiB and 4 MiB.
        credit_size: bytes in flight at most; three chunks by default.
        mode: ``"priority"``, ``"fifo"``, ``"barrier"``, or ``"auto"``: measure what is fastest,
            sizes included; the default unless a size is given. With three or more ranks the last
            bits of a sum depend on where it is cut: name a size to have them equal in each run.
            Under ``torch.use_deterministic_algorithms`` no default is measured.
        transport: name of an engine (``"torch"``, ``"horovod"``, ``"kvstore"``, ``"mpi"``,
            ``"byteps"``) or a ``Transport``.
        sync_buffers: keep module buffers equal to rank 0's, as DistributedDataParallel does.
        separable: say True of an optimizer that is not from ``torch.optim`` and treats each
            parameter by itself: updates then need not wait for each other.
        trace: path of a timeline to write when the session ends.

    Keyword arguments come before ``BYTESCHEDULER_*`` environment variables.

    Raises:
        ConfigurationError: a setting breaks a rule, on this rank.
        UsageError: the process group is not initialised, optimizer and model do not fit, one of
            them is wrapped already, or ranks have different models (RankMismatchError): on all
            ranks, before anything was changed.
    """

    # GradScaler must unscale gradients itself: it would hand its scale to this object only.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        partition_size: int | str | None = None,
        credit_size: int | str | None = None,
        mode: str | None = None,
        transport: str | Transport = "torch",
        sync_buffers: bool = True,
        separable: bool | None = None,
        trace: str | None = None,
    ) -> None:
        reproducible = torch.are_deterministic_algorithms_enabled()

        def settle(bandwidth: float | None) -> Settings:
            return resolve_settings(
                partition_size=partition_size,
                credit_size=credit_size,
                mode=mode,
                trace=trace,
                model_bytes=_gradient_bytes(optimizer),
                bandwidth=None if reproducible else bandwidth,
                least_chunks=end.least_chunks,
                tunable=end.tunable and not reproducible,
            )

        def proposal() -> Proposal:
            _refuse_what_is_wrapped(optimizer, model)
            return Proposal(unwrap_horovod(optimizer) or optimizer, model, settle(None))

        end = _open(transport, group, model)
        try:
            agreed = agree_on(end, proposal)
            optimizer, named = agreed.optimizer, agreed.named
            _retire_predecessors(model, optimizer)
            bandwidth = broadcast_timed(end, [*model.parameters(), *model.buffers()])
            settings = settings_of_rank_0(end, settle(bandwidth))
            broadcast_optimizer_state(end, optimizer)
            recorder = settings.trace and TraceRecorder(settings.trace, end.rank, end.world_size)
            self._recorder = recorder or None
            self._session = Session(
                model,
                optimizer,
                named,
                agreed.sparse,
                end,
                settings,
                sync_buffers=sync_buffers,
                separable=separable,
                observer=self._recorder,
                tuner=tuner_of(end, settings, named, bandwidth),
            )
        except BaseException:
            end.close()
            raise
        self._inner = optimizer
        self._check = CheckMode(self._session.keeper) if os.environ.get(ENV_CHECK) == "1" else None
        if self._check is not None:
            self._check.__enter__()
        self._finalizer = weakref.finalize(self, _end, self._session, self._recorder, os.getpid())
        _wrapped[optimizer] = weakref.ref(self)
        _wrappers.setdefault(model, weakref.WeakSet()).add(self)

    # -- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; see the class for when it is applied.

        With a ``closure`` it is evaluated and applied before this returns, with gradients and loss
        averaged over ranks.

        Raises:
            TransportError: another rank failed or left.
        """
        return self._live.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients; of those that are in flight, once they have been used."""
        self._live.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, complete; loads into an unwrapped one as well."""
        self.synchronize()
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that any optimizer of the wrapped class saved."""
        self.synchronize()
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer, on all ranks; exchanged from the next step on."""
        self.synchronize()
        self._inner.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register on the wrapped optimizer; from now on ``step()`` waits for everything."""
        self.synchronize()
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register on the wrapped optimizer; from now on ``step()`` waits for everything."""
        self.synchronize()
        return self._inner.register_step_post_hook(hook)

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's groups; what is set here counts from the next ``step()`` on."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, after waiting for updates in flight."""
        self.synchronize()
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._inner.state = state

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)

    def __repr__(self) -> str:
        return f"ScheduledOptimizer({self._inner!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        self.synchronize()
        return copy.deepcopy(self._inner, memo)

    def __reduce__(self) -> Any:
        self.synchronize()
        return _itself, (self._inner,)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    # -- what is ours

    @property
    def settings(self) -> Settings:
        """Sizes and mode that are in force."""
        return self._session.settings

    def synchronize(self) -> None:
        """Wait until gradients, weights and buffers are current.

        Raises:
            TransportError: another rank failed or left.
        """
        if self._finalizer.alive:
            self._session.synchronize()

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Backward passes inside accumulate; the next one outside, or ``step()``, exchanges."""
        self._live.set_paused(True)
        try:
            yield
        finally:
            self._session.set_paused(False)

    @contextmanager
    def join(self) -> Generator[None, None, None]:
        """For uneven inputs: a rank that leaves the block early keeps the others company.

        Put the loop over the data inside, on all ranks. A rank that has run out takes part in the
        others' steps with no gradient of its own (averages still divide by the number of ranks) and
        makes the same updates, until all have left the block. Costs one small message per step.
        """
        session = self._live
        session.set_joining(True)
        yield
        session.join()
        session.set_joining(False)

    def unwrap(self) -> Optimizer:
        """Collective: finish what is in flight, take everything off, return the inner optimizer."""
        if self._finalizer.alive:
            self._finalizer.detach()
            self._shut(finish=True)
        return self._inner

    def __enter__(self) -> ScheduledOptimizer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._finalizer.alive:
            self._finalizer.detach()
            self._shut(finish=error is None)

    def _shut(self, *, finish: bool) -> None:
        if self._check is not None:
            self._check.__exit__(None, None, None)
        _wrapped.pop(self._inner, None)
        _close(self._session, self._recorder, finish=finish)

    @property
    def _live(self) -> Session:
        if not self._finalizer.alive:
            raise UsageError(
                "this ScheduledOptimizer was unwrapped, or its model was wrapped again; "
                "use the optimizer that unwrap() returned, or the newer wrapper"
            )
        return self._session


def _itself(optimizer: Optimizer) -> Optimizer:
    """What a pickled wrapper becomes: the optimizer that it wrapped."""
    return optimizer


def _refuse_what_is_wrapped(optimizer: Any, model: Any) -> None:
    if isinstance(optimizer, ScheduledOptimizer):
        raise UsageError(
            "an optimizer may be wrapped once, got a ScheduledOptimizer; use it as it is, "
            "or wrap what its unwrap() returns"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "pass the optimizer first and the model second"
        )
    previous = _wrapped.get(optimizer)
    if previous is not None and previous() is not None:
        raise UsageError(
            "an optimizer may be wrapped once, and this one is; use its wrapper, "
            "or call unwrap() on it first"
        )
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "model must not be wrapped in DistributedDataParallel, which averages gradients "
            "itself; pass model.module"
        )
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "pass the optimizer first and the model second"
        )


def _open(
    transport: str | Transport, group: dist.ProcessGroup | None, model: nn.Module
) -> Transport:
    if isinstance(transport, Transport):
        return transport
    if transport == "torch":
        return transports.create("torch", group=group, device=_device_of(model))
    if group is not None:
        raise ConfigurationError(
            f"group goes with transport='torch' only, got transport={transport!r}; leave it out"
        )
    return transports.create(transport)


def _device_of(model: Any) -> torch.device | str:
    """Where the gradients will lie; whether ``model`` is one is checked on all ranks later."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return "cpu" if parameter is None else parameter.device


def _gradient_bytes(optimizer: Optimizer) -> int:
    """What is exchanged, the flags behind the gradients included."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return sum(
        p.numel() * p.element_size() + 2 * ALIGNMENT
        for p in parameters
        if p.requires_grad and not isinstance(p, nn.parameter.UninitializedParameter)
    )


def _retire_predecessors(model: nn.Module, optimizer: Optimizer) -> None:
    """Wrapping the same parameters again (a new optimizer per epoch) ends the earlier wrapper."""
    for wrapper in list(_wrappers.get(model, ())):
        if not _ids(wrapper).isdisjoint(_ids(optimizer)):
            wrapper.unwrap()


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _close(session: Session, recorder: TraceRecorder | None, *, finish: bool) -> None:
    try:
        session.close(finish=finish)
    finally:
        if recorder is not None:
            recorder.write()


def _end(session: Session, recorder: TraceRecorder | None, pid: int) -> None:
    """At exit, or when the wrapper is dropped; a forked child leaves its parent's session alone."""
    if os.getpid() == pid:
        _close(session, recorder, finish=not session.unfinished)

"""What-if model of one training job: would scheduling help, and how much?

::

    from bytescheduler.simulate import Network, Schedule, load_profile, simulate

    profile = load_profile("vgg16", compute_s=0.25)       # or Profile(name=..., layers=(...))
    network = Network(workers=64, bandwidth=25e9 / 8, latency_s=10e-6)
    result = simulate(profile, network, Schedule(policy="priority"))
    result.iteration_s, result.bound_s, result.limit_s    # seconds
    result.timeline                                       # Span(track, name, start_s, end_s)

- A :class:`Profile` is a tuple of :class:`Layer` (``forward_s``, ``backward_s``,
  ``gradient_bytes``, ``update_s``) in forward order. :func:`load_profile` returns one that ships
  with the package (:func:`profile_names`), :func:`load_trace` one that was recorded in a job.
- A :class:`Network` gives each chunk its alpha-beta cost (``ring``, ``tree``, ``ps``), and its
  ``overhead_s`` per chunk and ``announcement_s`` are those of the scheduler.
- A :class:`Schedule` is a policy (``barrier``, ``fifo``, ``priority``, ``dear``) with
  ``partition_bytes`` and ``credit_bytes``, or ``bucket_bytes`` for DistributedDataParallel's.
- :func:`simulate` returns a :class:`Result`; :func:`bound_s` alone is the structural bound.
- :func:`best_schedule` searches the sizes, :func:`losses` names what costs how much.

A simulation of a few hundred chunks takes about a millisecond: it serves as the objective of a
search. Everything is deterministic. Only the standard library is used.
"""

from bytescheduler.simulate.engine import bound_s, simulate
from bytescheduler.simulate.model import (
    POLICIES,
    Layer,
    Network,
    Policy,
    Profile,
    Result,
    Schedule,
    Span,
)
from bytescheduler.simulate.profiles import load_profile, profile_names
from bytescheduler.simulate.search import Loss, best_schedule, losses
from bytescheduler.simulate.traces import load_trace, write_timeline

__all__ = [
    "POLICIES",
    "Layer",
    "Loss",
    "Network",
    "Policy",
    "Profile",
    "Result",
    "Schedule",
    "Span",
    "best_schedule",
    "bound_s",
    "load_profile",
    "load_trace",
    "losses",
    "profile_names",
    "simulate",
    "write_timeline",
]

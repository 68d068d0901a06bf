"""Generated workloads: arrivals of three manners, jobs of the paper's nine kinds.

``paper_nodes`` and ``generate`` make a workload in the manner of the Optimus paper (EuroSys 2018,
section 6): seven CPU servers with 16 cores and six with 8; nine jobs, one of each kind, synchronous
or asynchronous, convergence thresholds between 1 and 5 %, arrivals within 12,000 s. What the paper
does not publish is chosen in ``kinds.py`` and here, and documented in docs/cluster.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from bytescheduler.cluster.contract import Node, Resources, Shape
from bytescheduler.cluster.kinds import KINDS, Kind
from bytescheduler.cluster.model_job import TrainingModel
from bytescheduler.cluster.models.convergence import PATIENCE_EPOCHS, ConvergenceFit
from bytescheduler.cluster.models.speed import Mode, SpeedModel
from bytescheduler.cluster.simulated_job import JobSpec
from bytescheduler.cluster.workload import ModelEntry
from bytescheduler.exceptions import ConfigurationError

__all__ = ["ARRIVALS", "Arrivals", "GeneratorSettings", "arrival_times", "generate", "paper_nodes"]

Arrivals = Literal["uniform", "poisson", "bursty"]
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)
JOBS_PER_BURST = 5
BURST_SECONDS = 60.0
TASK = Resources(cpu=2, memory=8)
MOST_TASKS = Shape(16, 16)
REQUESTS = (2, 4, 6, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """What to generate.

    Attributes:
        jobs: how many.
        span: seconds within which they arrive.
        arrivals: uniform, Poisson (exponential gaps) or bursty (groups of five within a minute).
        seed: equal seeds give equal workloads.

    Raises:
        ConfigurationError: no job, a negative span or unknown arrivals.
    """

    jobs: int = 9
    span: float = 12_000.0
    arrivals: Arrivals = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ConfigurationError(f"a workload must have at least one job, got {self.jobs}")
        if self.span < 0:
            raise ConfigurationError(f"the span must be at least 0 s, got {self.span}")
        if self.arrivals not in ARRIVALS:
            raise ConfigurationError(
                f"arrivals must be one of {', '.join(ARRIVALS)}, got {self.arrivals!r}"
            )


def arrival_times(settings: GeneratorSettings, rng: np.random.Generator) -> list[float]:
    """Return whole seconds of submission, ascending."""
    jobs, span = settings.jobs, settings.span
    if settings.arrivals == "uniform":
        times = rng.uniform(0, span, jobs)
    elif settings.arrivals == "poisson":
        times = np.cumsum(rng.exponential(span / jobs, jobs))
    else:
        starts = rng.uniform(0, span, -(-jobs // JOBS_PER_BURST))
        times = np.repeat(starts, JOBS_PER_BURST)[:jobs] + rng.uniform(0, BURST_SECONDS, jobs)
    return np.sort(np.floor(times)).tolist()


def generate(settings: GeneratorSettings) -> list[ModelEntry]:
    """Return jobs of the nine kinds in order of submission, each kind equally often."""
    rng = np.random.default_rng(settings.seed)
    kinds: list[Kind] = []
    while len(kinds) < settings.jobs:
        kinds += [list(KINDS.values())[i] for i in rng.permutation(len(KINDS))]
    return [
        _entry(number, time, kinds[number], rng)
        for number, time in enumerate(arrival_times(settings, rng))
    ]


def _entry(number: int, time: float, kind: Kind, rng: np.random.Generator) -> ModelEntry:
    mode: Mode = "sync" if rng.random() < 0.5 else "async"
    asked = int(rng.choice(REQUESTS))
    threshold = float(rng.uniform(0.01, 0.05))
    return ModelEntry(
        spec=JobSpec(
            name=f"{kind.name}-{number}",
            submitted=time,
            kind=kind.name,
            requested=Shape(asked, asked),
            limit=MOST_TASKS,
            worker=TASK,
            server=TASK,
        ),
        model=_training(kind, mode, threshold),
    )


def _training(kind: Kind, mode: Mode, threshold: float) -> TrainingModel:
    """An asynchronous step takes one worker's small batch, so an epoch has more of them."""
    per_epoch = kind.steps_per_epoch * (1 if mode == "sync" else kind.batch // kind.mini)
    b0, b1, b2 = kind.loss
    curve = ConvergenceFit(b0=b0 / per_epoch, b1=b1, b2=b2, scale=1 / b1 + b2)
    relative = threshold * curve.scale
    return TrainingModel(
        speed=SpeedModel(mode=mode, coefficients=kind.coefficients(mode), batch=kind.batch),
        steps=curve.convergence_step(relative, per_epoch, PATIENCE_EPOCHS),
        steps_per_epoch=per_epoch,
        loss=(curve.b0, b1, b2),
        threshold=threshold,
        blocks=kind.blocks,
    )


def paper_nodes() -> list[Node]:
    """Return the paper's 13 servers: 7 with 16 cores and 80 GiB, 6 with 8 cores, 48 GiB, 2 GPUs."""
    large = [Node(id=i, capacity=Resources(cpu=16, memory=80)) for i in range(7)]
    small = [Node(id=i, capacity=Resources(cpu=8, memory=48, gpu=2)) for i in range(7, 13)]
    return large + small

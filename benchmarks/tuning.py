"""``python -m benchmarks.tuning``: how good is what tuning finds, and what does finding it cost?

The objective is the simulator, so that the true best of the whole grid is known and five seeds of
every cell take seconds; noise is put on top as it is measured in the lab: iterations a few percent
longer than they need to be, and now and then one that takes several times as long. Each cell is a
profile and a balance (exchange time over compute time). In each, the online tuner, random search
and grid search get the same number of samples, each of them measured in the same way, and are
compared by the true time of what they picked, over the true best.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from bytescheduler.core.config import Settings
from bytescheduler.simulate import (
    Network,
    Profile,
    Schedule,
    load_profile,
    profile_names,
    simulate,
)
from bytescheduler.tuning.auto import EXPECTED_ITERATIONS, AutoTuner
from bytescheduler.tuning.samples import Sample, enough, summarise
from bytescheduler.tuning.space import Space

__all__ = ["Cell", "SimulatedJob", "Tuned", "grid_search", "picked", "random_search", "tune"]

SAMPLES = 15
BALANCES = (0.25, 0.5, 1.0, 2.0, 4.0)
SEEDS = 5
COMPUTE_S = 0.15
SCALE = 32  # sizes are divided by it, as in the lab
OVERHEAD_S = 300e-6  # host time to start a chunk
ANNOUNCEMENT_S = 300e-6
LATENCY_S = 200e-6
OUTLIER_SHARE = 0.01


class SimulatedJob:
    """A job whose iteration time under any settings is known, and measured with noise.

    Args:
        profile: name of a profile that ships with the package.
        balance: exchange time over compute time; may be changed while it runs.
        seed: of the noise.
        noise: deviation of an iteration, relative; always upwards.
        scale: gradient sizes are divided by it.
        compute_s: seconds of forward and backward.
    """

    def __init__(
        self,
        profile: str,
        balance: float,
        *,
        seed: int = 0,
        noise: float = 0.02,
        scale: float = SCALE,
        compute_s: float = COMPUTE_S,
        overhead_s: float = OVERHEAD_S,
    ) -> None:
        self.balance = balance
        self._profile: Profile = load_profile(profile, compute_s=compute_s).shrunk(scale)
        self._overhead_s = overhead_s
        self._random = random.Random(seed)
        self._noise = noise
        self._known: dict[tuple[float, Settings], float] = {}
        self.space = Space(total_bytes=self._profile.gradient_bytes, base=Settings())

    def seconds(self, settings: Settings) -> float:
        """The true iteration time."""
        key = (self.balance, settings)
        if key not in self._known:
            self._known[key] = self._simulate(settings)
        return self._known[key]

    def measure(self, settings: Settings) -> float:
        """The time of one iteration, with noise and the odd outlier."""
        seconds = self.seconds(settings) * (1 + self._noise * abs(self._random.gauss(0, 1)))
        if self._random.random() < OUTLIER_SHARE:
            seconds *= self._random.uniform(2, 10)
        return seconds

    def best(self) -> float:
        """The shortest iteration of the whole grid."""
        return min(self.seconds(settings) for settings in self.space.candidates())

    def _simulate(self, settings: Settings) -> float:
        exchange_s = self.balance * self._profile.compute_s
        network = Network(
            workers=2,
            bandwidth=self._profile.gradient_bytes / exchange_s,
            latency_s=LATENCY_S,
            overhead_s=self._overhead_s,
            announcement_s=ANNOUNCEMENT_S,
            concurrency=2,
        )
        schedule = Schedule(
            policy="priority" if settings.mode == "auto" else settings.mode,
            partition_bytes=settings.partition_size,
            credit_bytes=settings.credit_size,
        )
        return simulate(self._profile, network, schedule).iteration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What a run of the online tuner did.

    Attributes:
        settings: in force at the end.
        samples: all that were measured until it watched.
        cost: seconds lost against the best of the grid, the tuner's own computing included, over
            the seconds of 5,000 best iterations.
        iterations: until it watched.
    """

    settings: Settings
    samples: list[Sample]
    cost: float
    iterations: int


def tune(job: SimulatedJob, tuner: AutoTuner, start: Settings) -> Tuned:
    """Run the job until the tuner has decided."""
    best, now, lost, iterations = job.best(), 0.0, 0.0, 0
    settings = start
    tuner.step(now)
    while tuner.searching:
        now += job.measure(settings)
        lost += job.seconds(settings) - best
        began = time.perf_counter()
        settings = tuner.step(now) or settings
        lost += time.perf_counter() - began
        iterations += 1
    return Tuned(
        settings=settings,
        samples=list(tuner.samples),
        cost=lost / (best * EXPECTED_ITERATIONS),
        iterations=iterations,
    )


def picked(samples: Sequence[Sample], budget: int = SAMPLES) -> Settings:
    """The settings that measured best within the budget."""
    return min(samples[:budget], key=lambda sample: sample.seconds).settings


def random_search(job: SimulatedJob, seed: int, budget: int = SAMPLES) -> Settings:
    """The best of ``budget`` settings drawn from the candidates."""
    drawn = random.Random(seed).sample(job.space.candidates(), budget)
    return _best_measured(job, drawn)


def grid_search(job: SimulatedJob, budget: int = SAMPLES) -> Settings:
    """The best of ``budget`` settings that are spread evenly over the candidates."""
    candidates = sorted(
        job.space.candidates(), key=lambda item: (item.mode, item.partition_size, item.credit_size)
    )
    step = len(candidates) / budget
    return _best_measured(job, [candidates[int((n + 0.5) * step)] for n in range(budget)])


def _best_measured(job: SimulatedJob, settings: Sequence[Settings]) -> Settings:
    samples: list[Sample] = []
    for item in settings:
        best = min(samples, key=lambda sample: sample.seconds, default=None)
        times = [job.measure(item)]
        while not enough(item, times, best):
            times.append(job.measure(item))
        samples.append(summarise(item, times))
    return picked(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One profile at one balance; times over the best of the grid, less 1, medians over seeds.

    Attributes:
        auto: after at most 15 samples.
        decided: after the decision; ``decided_worst`` over the seeds.
        random, grid: searches with 15 samples.
        cost: share of 5,000 iterations, the worst of the seeds.
    """

    profile: str
    balance: float
    auto: float
    decided: float
    decided_worst: float
    random: float
    grid: float
    cost: float
    samples: int


def measure(profile: str, balance: float, seeds: int = SEEDS) -> Cell:
    """Compare the searches in one cell."""
    runs = [_run_tuner(SimulatedJob(profile, balance, seed=seed)) for seed in range(seeds)]

    def excess(search: Callable[[SimulatedJob, int], Settings]) -> float:
        jobs = [SimulatedJob(profile, balance, seed=seed) for seed in range(seeds)]
        return statistics.median(
            job.seconds(search(job, seed)) / job.best() - 1 for seed, job in enumerate(jobs)
        )

    decided = [job.seconds(run.settings) / job.best() - 1 for job, run in runs]
    return Cell(
        profile=profile,
        balance=balance,
        auto=statistics.median(
            job.seconds(picked(run.samples)) / job.best() - 1 for job, run in runs
        ),
        decided=statistics.median(decided),
        decided_worst=max(decided),
        random=excess(random_search),
        grid=excess(lambda job, _: grid_search(job)),
        cost=max(run.cost for _, run in runs),
        samples=round(statistics.median(len(run.samples) for _, run in runs)),
    )


def _run_tuner(job: SimulatedJob) -> tuple[SimulatedJob, Tuned]:
    start = Settings(mode="auto")
    return job, tune(job, AutoTuner(job.space, initial=start), start)


def samples_after_change(profile: str, before: float, after: float, seed: int) -> tuple[int, float]:
    """Change the network's rate while the tuner watches.

    Returns:
        Samples of the search that follows, and the true excess of what it picks.
    """
    job = SimulatedJob(profile, before, seed=seed)
    start = Settings(mode="auto")
    tuner = AutoTuner(job.space, initial=start)
    settings = tune(job, tuner, start).settings
    job.balance = after
    now = 1e6
    tuner.step(now)
    for _ in range(200):
        now += job.measure(settings)
        settings = tuner.step(now) or settings
        if tuner.searching:
            break
    tuned = tune(job, tuner, settings)
    return len(tuned.samples), job.seconds(tuned.settings) / job.best() - 1


def main() -> None:
    """Print the table; write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the cells")
    parser.add_argument("--profiles", nargs="+", default=profile_names(), metavar="NAME")
    args = parser.parse_args()
    print("profile        balance   auto  decided (worst)  random    grid   cost  samples")
    cells: list[Cell] = []
    for profile, balance in product(args.profiles, BALANCES):
        cell = measure(profile, balance)
        cells.append(cell)
        print(
            f"{profile:14} {balance:7g} {cell.auto:6.1%} {cell.decided:7.1%} "
            f"({cell.decided_worst:5.1%}) {cell.random:7.1%} {cell.grid:7.1%} "
            f"{cell.cost:6.2%} {cell.samples:7}",
            flush=True,
        )
    for before, after in ((0.5, 2.0), (2.0, 0.5), (1.0, 4.0)):
        samples, excess = samples_after_change("vgg16", before, after, seed=0)
        print(f"balance {before:g} becomes {after:g}: {samples} samples, {excess:.1%} off the best")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(cell) for cell in cells], indent=1))


if __name__ == "__main__":
    main()

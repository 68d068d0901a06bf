"""``mode="auto"``: find the fastest settings while the job runs, then get out of the way.

The tuner lives on rank 0, in the thread that trains; it is told when an iteration ends and answers
with new settings or None. It has no thread, no clock and no randomness of its own: equal times give
equal decisions. One coroutine reads like the procedure it is::

    skip the start-up
    repeat:
        search:  anchors and first guesses, then what a Gaussian process expects to improve most
        decide:  the best few take turns until they can be told apart; the winner stays
        watch:   until the iteration time has changed for good

What makes it safe to leave on:

* Large buckets with a barrier (DistributedDataParallel), our default and the user's own sizes are
  always measured, and take part in the decision unless they are clearly slower: nothing slower
  than them is kept, nor anything that is no faster for all that can be told. The start-up runs
  under the first guess or that barrier, which is never far off.
* Every second lost against the best settings known is counted, switches and the tuner's own
  computing included, against a budget of 1 % of 5,000 iterations for each search and 2 % of the
  run in all. A search that has spent its budget goes straight to the decision; a sample that
  loses too much is broken off, and chunks smaller than hopelessly slow ones are not tried, now or
  in later searches.
* In the search the best settings so far are measured again now and then; if they have changed,
  what was measured before is forgotten.
* Where one process trains with several optimizers, their tuners take turns: two that try things at
  once would measure each other.

Adapters call :func:`bytescheduler.tuning.make_tuner` on rank 0, which calls
``AutoTuner.for_job(signature=..., world_size=..., engine=..., device=..., total_bytes=...,
initial=...)``.

Considered instead: tuning before training (costs a restart, goes stale), a helper thread for the
Gaussian process (competes with training for the interpreter; see ``gaussian`` for why none is
needed), bandits over a fixed list (need more samples as sizes interact with the schedule).
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescheduler.core.config import Settings
from bytescheduler.tuning.cache import Cache, JobKey
from bytescheduler.tuning.gaussian import expected_improvement, fit
from bytescheduler.tuning.samples import CLEARLY_BAD, Sample, enough, pooled, summarise
from bytescheduler.tuning.space import Space, features

__all__ = ["AutoTuner"]

START_UP: Final = 8  # iterations in which adapter, allocator and caches settle
WARM_UP: Final = 2  # iterations after a switch that still carry the old settings' chunks
SEARCH_SAMPLES: Final = 14
NEGLIGIBLE: Final = 0.003  # expected improvement, relative, at which a search ends
BAD: Final = 0.3  # log of how much slower than the best counts as bad, whatever more it is
HOPELESS: Final = 2.0  # times the best one's seconds: chunks smaller than these are not tried
TOO_COSTLY: Final = 10  # iterations' time that a sample may lose before it is broken off
REMEASURE_EVERY: Final = 7  # samples
CHANGED: Final = 0.10  # relative difference of one setting's two samples that is no noise
DECISION_TURNS: Final = 4  # at most, per contestant
TURN_ITERATIONS: Final = (8, 48)  # at least and at most
DECISION_ERROR: Final = 0.003  # standard error that all turns together aim for, relative
CONTESTANT: Final = 0.06  # relative distance from the best that still lets it take part
WINDOW: Final = 20  # iterations that drift is judged by
WINDOWS: Final = 4  # in a row, beyond the threshold on one side
DRIFT: Final = 0.06  # relative change of the iteration time that counts
LEVELS: Final = 16  # windows that tell how much the iteration time wanders by itself
EXPECTED_ITERATIONS: Final = 5000
SEARCH_BUDGET: Final = 0.01  # of EXPECTED_ITERATIONS, for one search
TOTAL_BUDGET: Final = 0.02  # of the run, at least of EXPECTED_ITERATIONS

Run = Generator[Settings | None, float, None]

_turn = threading.Lock()  # whose tuner of this process is searching has it


class AutoTuner:
    """Implements ``bytescheduler.core.exchange.Tuner``.

    Args:
        space: the candidates.
        initial: the settings in force when the first iteration ends.
        guess: tried first, e.g. what was found last time.
        remember: told the settings of each decision and their seconds per iteration.

    Attributes:
        settings: the ones in force, or asked for.
        samples: what the present search has measured, in order; decisions included.
        searching: False while watching.
        spent: seconds lost by searches that have ended.
    """

    def __init__(
        self,
        space: Space,
        *,
        initial: Settings,
        guess: Settings | None = None,
        remember: Callable[[Settings, float], None] | None = None,
    ) -> None:
        self.settings = initial
        self.samples: list[Sample] = []
        self.searching = True
        self._earlier: dict[Settings, Sample] = {}  # what earlier searches measured last
        self._space = space
        self._candidates = space.candidates()
        self._features = np.array([features(settings) for settings in self._candidates])
        self._guess = guess
        self._remember = remember
        self._pending: Settings | None = None
        self._iterations = 0
        self.spent = 0.0
        self._search_times: list[float] = []  # every iteration of the present search
        self._last: float | None = None
        self._run = self._procedure()
        next(self._run)

    @classmethod
    def for_job(
        cls,
        *,
        signature: str,
        world_size: int,
        engine: str,
        device: str,
        total_bytes: int,
        initial: Settings,
        bandwidth: float | None = None,
        cache: Cache | None = None,
    ) -> AutoTuner:
        """A tuner that starts with what the user's cache knows, and keeps what it finds there.

        Args:
            signature: names, shapes and dtypes of the parameters.
            world_size: number of ranks.
            engine: name of the transport.
            device: kind of device, e.g. ``cpu`` or ``cuda NVIDIA H100``.
            total_bytes: bytes of all gradients of one rank.
            initial: settings in force at the start.
            bandwidth: bytes per second between ranks, as the adapter measured it.
            cache: where to keep what is found; the user's by default.
        """
        store = Cache() if cache is None else cache
        key = JobKey(
            signature=hashlib.sha256(signature.encode()).hexdigest(),
            world_size=world_size,
            engine=engine,
            device=device,
            bandwidth=bandwidth,
        )
        return cls(
            Space(total_bytes=total_bytes, base=replace(initial, mode="priority")),
            initial=initial,
            guess=store.load(key, initial),
            remember=lambda settings, seconds: store.store(key, settings, seconds),
        )

    def step(self, now: float) -> Settings | None:
        """An iteration ended at ``now`` (``perf_counter`` seconds): new settings, or None."""
        last, self._last = self._last, now
        return None if last is None else self._run.send(now - last)

    def close(self) -> None:
        """The job is over; ``step`` is not called any more."""
        self._run.close()

    # -- the procedure

    def _procedure(self) -> Run:
        yield from self._pass(1)
        self._switch(self._guess or self._space.anchors[0])
        yield from self._pass(START_UP - 1)
        while True:
            winner = yield from self._alone(self._settle())
            yield from self._watch(winner)

    def _alone(
        self, search: Generator[Settings | None, float, Sample]
    ) -> Generator[Settings | None, float, Sample]:
        """Search when no other tuner of this process does; before, use what was best or usual."""
        if not _turn.acquire(blocking=False):
            self._switch(self._guess or self._space.users)
            while not _turn.acquire(blocking=False):
                yield from self._pass(1)
        try:
            return (yield from search)
        finally:
            _turn.release()

    def _settle(self) -> Generator[Settings | None, float, Sample]:
        """Search and decide, again if what was measured held no longer when it was decided."""
        self.searching = True
        while True:
            self._forget()
            yield from self._search()
            expected = {sample.settings: sample for sample in self._measured()}
            winner = yield from self._decide()
            self.spent += self._lost(winner.seconds)
            self._search_times = []
            self._guess = winner.settings
            if self._remember is not None:
                self._remember(winner.settings, winner.seconds)
            if not _differ(winner, expected[winner.settings]) or not self._affordable():
                self.searching = False
                return winner

    def _search(self) -> Run:
        yield from self._begin()
        while len(self.samples) < SEARCH_SAMPLES and self._affordable():
            if len(self.samples) % REMEASURE_EVERY == 0:
                yield from self._measure_again()
                continue
            settings = self._ask()
            if settings is None:
                return
            yield from self._sample(settings)

    def _begin(self) -> Run:
        """Measure without asking: last time's best, the user's, anchors, then smaller chunks."""
        guess = [self._guess] if self._guess is not None else []
        for settings in dict.fromkeys([*guess, *self._space.known]):
            yield from self._sample(settings)
        for settings in self._space.first_guesses:
            if settings.partition_size <= self._smallest():
                return
            if settings not in {sample.settings for sample in self.samples}:
                sample = yield from self._sample(settings)
                if sample.seconds > (1 + CLEARLY_BAD) * self._best().seconds:
                    return  # chunks that are smaller still would cost more than they tell

    def _measure_again(self) -> Run:
        """Measure the best again; if it has changed, forget what was measured before."""
        best = self._best()
        sample = yield from self._sample(best.settings)
        if _differ(sample, best):
            self._forget()
            self.samples.append(sample)
            yield from self._begin()

    def _forget(self) -> None:
        """Begin anew; what was measured tells only how much small chunks cost."""
        self._earlier.update((sample.settings, sample) for sample in self.samples)
        self.samples, self._search_times = [], []

    def _ask(self) -> Settings | None:
        """Where the most improvement is expected; None where hardly any is."""
        measured = self._measured()
        fastest = self._best()
        seconds = np.log([sample.seconds / fastest.seconds for sample in measured])
        seconds = np.minimum(seconds, BAD)  # how bad the bad ones are is of no interest
        points = np.array([features(sample.settings) for sample in measured])
        process = fit(points, seconds, np.array([sample.error for sample in measured]))
        best = float(np.min(process.posterior(points)[0]))  # the least measured may be luck
        gain = expected_improvement(*process.posterior(self._features), best)
        known = {sample.settings for sample in measured}
        smallest = self._smallest()
        gain[[item in known or item.partition_size <= smallest for item in self._candidates]] = 0.0
        near = gain * self._near(fastest.settings)
        local = len(self.samples) % 3 > 0 and float(np.max(near)) > NEGLIGIBLE
        index = int(np.argmax(near if local else gain))
        return self._candidates[index] if gain[index] > NEGLIGIBLE else None

    def _smallest(self) -> int:
        """The smallest partition worth trying: the largest that cost too much, below the best's."""
        best = self._best()
        return max(
            (
                sample.settings.partition_size
                for sample in (*self.samples, *self._earlier.values())
                if sample.seconds > HOPELESS * best.seconds
                and sample.settings.partition_size < best.settings.partition_size
            ),
            default=0,
        )

    def _near(self, settings: Settings) -> npt.NDArray[np.float64]:
        """1 for candidates at most an octave away under the same schedule, 0 for others."""
        distance = np.abs(self._features - features(settings))
        return np.all(distance <= (1.0, 1.0, 0.0, 0.0), axis=1).astype(np.float64)

    def _decide(self) -> Generator[Settings | None, float, Sample]:
        """The best few and the anchors take turns; clear losers leave, the winner is returned."""
        best = self._best()
        contestants = self._shortlist(
            [
                sample
                for sample in self._measured()
                if sample.seconds <= best.seconds * (1 + CONTESTANT + 2 * sample.error)
            ]
        )
        turns: dict[Settings, list[Sample]] = {sample.settings: [] for sample in contestants}
        length = _turn_length(contestants)
        for _ in range(DECISION_TURNS):
            for settings in turns:
                turns[settings].append((yield from self._sample(settings, iterations=length)))
            turns = _without_losers(turns)
            if len(turns) == 1:
                break
        winner = self._winner([pooled(items) for items in turns.values()])
        self._switch(winner.settings)
        return winner

    def _shortlist(self, samples: Sequence[Sample]) -> list[Sample]:
        """The fastest two, and what nothing kept may be slower than."""
        ranked = sorted(samples, key=lambda sample: sample.seconds)
        known = self._space.known
        return [
            sample for place, sample in enumerate(ranked) if place < 2 or sample.settings in known
        ]

    def _winner(self, samples: Sequence[Sample]) -> Sample:
        """The fastest, unless something known is as fast for all that can be told.

        The fastest of several that are alike was lucky, and what is known holds fewer surprises.
        """
        best = min(samples, key=lambda sample: sample.seconds)
        alike = {sample.settings: sample for sample in samples if _excess(sample, best) <= 1.0}
        return next((alike[item] for item in self._space.known if item in alike), best)

    def _watch(self, reference: Sample) -> Run:
        """Return when the iteration time has left its level for good and a search is affordable.

        On a machine that is shared, iteration times wander; what they do anyway is no change.
        """
        yield from self._pass(WARM_UP)
        levels: deque[float] = deque(maxlen=LEVELS)  # relative to the reference
        while True:
            window = yield from self._pass(WINDOW)
            levels.append(median(window) / reference.seconds)
            wandering = summarise(reference.settings, levels).spread
            threshold = max(DRIFT, 6 * reference.error, 3 * wandering)
            recent = list(levels)[-WINDOWS:]
            left = min(recent) > 1 + threshold or max(recent) < 1 - threshold
            if left and len(recent) == WINDOWS and self._affordable():
                return

    # -- measuring

    def _sample(
        self, settings: Settings, iterations: int | None = None
    ) -> Generator[Settings | None, float, Sample]:
        """Switch, let it settle, measure; ``iterations`` of them or as many as it takes."""
        self._switch(settings)
        best = min(self.samples, key=lambda sample: sample.seconds, default=None)
        seen: list[float] = []
        while not _done(settings, seen, iterations, best):
            seen.append((yield from self._iteration()))
        sample = summarise(settings, seen[WARM_UP:] or [min(seen)])
        self.samples.append(sample)
        return sample

    def _switch(self, settings: Settings) -> None:
        if settings != self.settings:
            self._pending = self.settings = settings

    def _pass(self, iterations: int) -> Generator[Settings | None, float, list[float]]:
        """Let so many iterations pass; return the seconds of each."""
        seconds: list[float] = []
        while len(seconds) < iterations:
            seconds.append((yield from self._iteration()))
        return seconds

    def _iteration(self) -> Generator[Settings | None, float, float]:
        """Hand out what was switched to; return the seconds of the iteration that follows."""
        pending, self._pending = self._pending, None
        seconds = yield pending
        self._iterations += 1
        if self.searching:
            self._search_times.append(seconds)
        return seconds

    def _measured(self) -> list[Sample]:
        """One sample per setting, those of the same settings pooled."""
        groups: dict[Settings, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.settings, []).append(sample)
        return [pooled(items) for items in groups.values()]

    def _best(self) -> Sample:
        return min(self._measured(), key=lambda sample: sample.seconds)

    # -- what it costs

    def _lost(self, best: float) -> float:
        """Seconds that the present search has cost so far."""
        return max(0.0, sum(self._search_times) - best * len(self._search_times))

    def _affordable(self) -> bool:
        """Whether another sample fits in the budgets."""
        if not self.samples:
            return True
        best = self._best().seconds
        lost = self._lost(best)
        run = max(EXPECTED_ITERATIONS, self._iterations) * best
        return (
            lost < SEARCH_BUDGET * EXPECTED_ITERATIONS * best
            and self.spent + lost < TOTAL_BUDGET * run
        )


def _done(
    settings: Settings, seen: Sequence[float], iterations: int | None, best: Sample | None
) -> bool:
    """Whether a sample is complete, with so many iterations ``seen`` since the switch."""
    times = seen[WARM_UP:]
    if iterations is not None:
        return len(times) >= iterations
    if best is not None and _too_costly(seen, best):
        return True
    return enough(settings, times, best)


def _too_costly(seen: Sequence[float], best: Sample) -> bool:
    """Whether a sample has cost more than it can tell, the slowest iteration (a stall?) aside."""
    rest = sorted(seen)[:-1]
    return sum(rest) > (len(rest) + TOO_COSTLY) * best.seconds


def _differ(one: Sample, other: Sample) -> bool:
    """Whether two samples of the same settings differ by more than noise explains."""
    difference = abs(one.seconds / other.seconds - 1.0)
    return difference > max(CHANGED, 4 * (one.error + other.error))


def _turn_length(samples: Sequence[Sample]) -> int:
    """Iterations per turn with which all turns together reach the error aimed for."""
    needed = max(len(item.times) * (item.error / DECISION_ERROR) ** 2 for item in samples)
    least, most = TURN_ITERATIONS
    return min(max(round(needed / DECISION_TURNS), least), most)


def _without_losers(turns: dict[Settings, list[Sample]]) -> dict[Settings, list[Sample]]:
    """Drop who is slower than the fastest by more than twice the error of their difference."""
    samples = {settings: pooled(items) for settings, items in turns.items()}
    best = min(samples.values(), key=lambda sample: sample.seconds)
    return {
        settings: turns[settings]
        for settings, sample in samples.items()
        if _excess(sample, best) <= 2.0
    }


def _excess(sample: Sample, best: Sample) -> float:
    """How much slower ``sample`` is than ``best``, in errors of their difference."""
    return (sample.seconds / best.seconds - 1.0) / math.hypot(sample.error, best.error)

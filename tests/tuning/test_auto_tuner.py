"""The online tuner against jobs whose best settings are known."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from analytic_job import START, AnalyticJob

from bytescheduler.core.config import Settings
from bytescheduler.tuning.auto import EXPECTED_ITERATIONS, START_UP, AutoTuner
from bytescheduler.tuning.cache import Cache
from bytescheduler.tuning.samples import Sample, enough, summarise

SEEDS = range(5)
CELLS = [
    {"exchange": exchange, "overhead": overhead}
    for exchange in (0.03, 0.1, 0.3)
    for overhead in (1e-5, 3e-4)
]
COSTLY_CHUNKS = [  # a search that tried all sizes here would take as long as the training
    {"exchange": 0.001, "overhead": 1e-3, "compute": 0.02},
    {"exchange": 0.0005, "overhead": 1e-3, "compute": 0.005},
    {"exchange": 0.0, "overhead": 3e-3, "compute": 0.02},
]


def disturbances(seed: int) -> Callable[[int], float]:
    """Three iterations in a hundred take up to ten times as long."""
    source = random.Random(seed)
    return lambda iteration: 1 + 9 * source.random() if source.random() < 0.03 else 1.0


def best_of(job: AnalyticJob, candidates: Iterable[Settings]) -> Settings:
    """The fastest of these, each measured as the tuner measures."""
    disturbed = disturbances(0)
    best: Sample | None = None
    for settings in candidates:
        times: list[float] = []
        while not enough(settings, times, best):
            noise = 1 + job.noise * abs(job.random.gauss(0, 1))
            times.append(job.seconds(settings) * noise * disturbed(0))
        sample = summarise(settings, times)
        best = min([best, sample], key=lambda item: item.seconds) if best else sample
    assert best is not None
    return best.settings


@pytest.mark.parametrize("cell", CELLS)
def test_ends_within_three_percent_of_the_best(cell: dict[str, float]) -> None:
    excesses = []
    for seed in SEEDS:
        job = AnalyticJob(**cell, seed=seed)
        tuner = job.tune()
        fifteen = min(tuner.samples[:15], key=lambda sample: sample.seconds)
        assert job.seconds(fifteen.settings) <= 1.05 * job.best()
        excesses.append(job.excess())
    assert sorted(excesses)[len(excesses) // 2] <= 0.03


def test_beats_random_and_grid_search_of_the_same_budget() -> None:
    excesses: dict[str, list[float]] = {"tuner": [], "random": [], "grid": []}
    for cell in CELLS:
        for seed in SEEDS:
            job = AnalyticJob(**cell, noise=0.05, seed=seed)
            tuner = job.tuner()
            job.run(tuner, lambda: not tuner.searching, disturbed=disturbances(seed))  # noqa: B023
            candidates = job.space.candidates()
            drawn = random.Random(seed).sample(candidates, 15)
            spaced = candidates[:: -(-len(candidates) // 15)]
            excesses["tuner"].append(job.excess())
            for name, search in (("random", drawn), ("grid", spaced)):
                excesses[name].append(job.seconds(best_of(job, search)) / job.best() - 1)
    means = {name: sum(values) / len(values) for name, values in excesses.items()}
    assert means["tuner"] < 0.5 * min(means["random"], means["grid"])


@pytest.mark.parametrize("cell", [*CELLS, *COSTLY_CHUNKS])
@pytest.mark.parametrize("seed", SEEDS)
def test_with_noise_and_stalls_it_stays_in_budget_and_beats_the_plain_order(
    cell: dict[str, float], seed: int
) -> None:
    job = AnalyticJob(**cell, noise=0.05, seed=seed)
    tuner = job.tuner()
    job.run(tuner, lambda: not tuner.searching, disturbed=disturbances(seed))
    assert job.lost < 0.02 * EXPECTED_ITERATIONS * job.best()
    plain, _ = job.space.anchors
    assert job.seconds(job.settings) <= 1.01 * job.seconds(plain)


def test_the_start_up_runs_in_the_plain_order() -> None:
    job = AnalyticJob()
    tuner = job.tuner()
    job.run(tuner, lambda: job.iterations == 1)
    assert job.settings == job.space.anchors[0]


@pytest.mark.parametrize("cell", CELLS)
def test_costs_less_than_two_percent_of_a_run_computing_included(cell: dict[str, float]) -> None:
    job = AnalyticJob(**cell)
    begin = time.thread_time()
    job.tune()
    computing = time.thread_time() - begin
    assert job.lost + computing < 0.02 * EXPECTED_ITERATIONS * job.best()


@pytest.mark.parametrize("seed", SEEDS)
def test_keeps_the_barrier_where_chunks_only_cost(seed: int) -> None:
    job = AnalyticJob(exchange=0.001, overhead=1e-3, compute=0.02, noise=0.05, seed=seed)
    tuner = job.tune()
    assert job.settings.mode == "barrier"
    assert job.excess() <= 0.01
    assert len(tuner.samples) <= 30


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.15])
def test_never_ends_on_something_slower_than_an_anchor(noise: float) -> None:
    for seed in SEEDS:
        job = AnalyticJob(exchange=0.01, overhead=2e-5, noise=noise, seed=seed)
        job.tune()
        best_anchor = min(job.seconds(anchor) for anchor in job.space.anchors)
        assert job.seconds(job.settings) <= best_anchor * (1 + noise / 5)


def test_of_what_cannot_be_told_apart_something_known_is_kept() -> None:
    """The plain order most often."""
    kept: list[Settings] = []
    for seed in range(20):
        job = AnalyticJob(exchange=0.0, overhead=0.0, noise=0.1, seed=seed)
        job.tune()
        kept.append(job.settings)
    plain, *others = job.space.known
    assert kept.count(plain) >= 8
    assert sum(settings in (plain, *others) for settings in kept) >= 18


def test_equal_times_give_equal_decisions() -> None:
    runs = [AnalyticJob(seed=3) for _ in range(2)]
    first, second = (job.tune() for job in runs)
    assert [sample.settings for sample in first.samples] == [
        sample.settings for sample in second.samples
    ]


def test_outliers_are_no_samples() -> None:
    """A checkpoint every 10 iterations that takes as long as 20 of them changes nothing."""
    job = AnalyticJob()
    tuner = job.tuner()
    job.run(
        tuner,
        lambda: not tuner.searching,
        disturbed=lambda iteration: 20.0 if iteration % 10 == 5 else 1.0,
    )
    assert job.excess() <= 0.03
    assert max(sample.seconds for sample in tuner.samples) < 5 * job.best()


def test_a_stall_does_not_start_a_new_search() -> None:
    job = AnalyticJob()
    tuner = job.tune()
    remaining = iter(range(400))

    def searching_or_over() -> bool:
        return tuner.searching or next(remaining, None) is None

    job.run(tuner, searching_or_over, disturbed=lambda n: 5.0 if 100 <= n < 115 else 1.0)
    assert not tuner.searching


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_whose_speed_wanders_does_not_start_a_new_search(seed: int) -> None:
    job = AnalyticJob()
    tuner = job.tune()
    chance = random.Random(seed)
    speeds = [chance.uniform(0.9, 1.1) for _ in range(60)]
    remaining = iter(range(1500))
    job.run(
        tuner,
        lambda: tuner.searching or next(remaining, None) is None,
        disturbed=lambda iteration: speeds[iteration // 25 % len(speeds)],
    )
    assert not tuner.searching


def test_small_chunks_once_seen_too_slow_are_not_tried_again() -> None:
    job = AnalyticJob(overhead=2e-3, exchange=0.05)
    tuner = job.tune()
    costly = {s.settings for s in tuner.samples if s.seconds > 2 * job.best()}
    assert costly
    job.exchange = 0.1
    job.run(tuner, lambda: tuner.searching, limit=100)
    job.tune(tuner)
    assert costly.isdisjoint(sample.settings for sample in tuner.samples)


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.4), (0.4, 0.05)])
def test_a_lasting_change_of_rate_is_answered_within_thirty_samples(
    before: float, after: float
) -> None:
    job = AnalyticJob(exchange=before, overhead=1e-4)
    tuner = job.tune()
    job.exchange = after
    job.run(tuner, lambda: tuner.searching, limit=100)
    job.tune(tuner)
    assert len(tuner.samples) <= 30
    assert job.excess() <= 0.03


def test_a_change_of_rate_in_the_middle_of_a_search_is_noticed() -> None:
    job = AnalyticJob(exchange=0.02)
    tuner = job.tuner()
    job.run(tuner, lambda: len(tuner.samples) == 8)
    job.exchange = 0.4
    job.tune(tuner)
    assert job.excess() <= 0.03


def test_searches_stop_when_the_budget_is_spent() -> None:
    """A network that changes all the time must not keep the tuner searching."""
    job = AnalyticJob()
    tuner = job.tuner()
    searching = 0
    total = 8100
    for _ in range(total // 300):
        job.exchange = 0.3 if job.exchange < 0.2 else 0.05
        states: list[bool] = []

        def counted(states: list[bool] = states) -> bool:
            states.append(tuner.searching)
            return len(states) > 300

        job.run(tuner, counted)
        searching += sum(states[1:])
    slowest_best = 0.1 + 0.3
    assert tuner.spent <= 0.03 * total * slowest_best
    assert searching < total / 2


def test_the_first_guess_is_measured_first() -> None:
    job = AnalyticJob()
    guess = job.space.candidates()[17]
    tuner = job.tune(job.tuner(guess=guess))
    assert tuner.samples[0].settings == guess


def test_what_was_found_is_the_first_guess_next_time(tmp_path: Path) -> None:
    def tuner(job: AnalyticJob) -> AutoTuner:
        tuner = AutoTuner.for_job(
            signature="model",
            world_size=2,
            engine="torch",
            device="cpu",
            total_bytes=job.space.total_bytes,
            initial=START,
            cache=Cache(tmp_path),
        )
        tuner.step(job.now)
        return tuner

    first, second = AnalyticJob(), AnalyticJob(seed=1)
    first.tune(tuner(first))
    again = second.tune(tuner(second))
    assert replace(again.samples[0].settings, mode="priority") == replace(
        first.settings, mode="priority"
    )


def test_the_users_own_sizes_take_part() -> None:
    job = AnalyticJob()
    mine = Settings(partition_size=3 << 20, credit_size=6 << 20, mode="auto", trace="t.json")
    tuner = AutoTuner.for_job(
        signature="model",
        world_size=2,
        engine="torch",
        device="cpu",
        total_bytes=job.space.total_bytes,
        initial=mine,
        cache=Cache(Path("/nonexistent")),
    )
    tuner.step(0.0)
    switched = [tuner.step(0.1 * n) for n in range(1, 20)]
    tuner.close()
    barrier, users = [item for item in switched if item]
    assert barrier.mode == "barrier"
    assert users == replace(mine, mode="priority")


@pytest.mark.parametrize("seed", SEEDS)
def test_tuners_of_one_process_take_turns(seed: int) -> None:
    """A generator's and a discriminator's, say: an iteration takes what both of them take."""
    jobs = [AnalyticJob(seed=seed), AnalyticJob(exchange=0.3, seed=seed + 100)]
    tuners = [job.tuner() for job in jobs]
    switches: list[list[int]] = [[], []]
    now = 0.0
    for iteration in range(1, 3000):
        searching = [tuner.searching for tuner in tuners]
        if not any(searching):
            break
        for job in jobs:
            now += job.seconds(job.settings) * (1 + job.noise * job.random.random())
        for job, tuner, mine in zip(jobs, tuners, switches, strict=True):
            settings = tuner.step(now)
            if settings is not None:
                mine.append(iteration)
                job.settings = settings
    first, second = switches
    assert not any(tuner.searching for tuner in tuners)
    assert [iteration for iteration in second if START_UP < iteration < first[-1]] == []
    joint = sum(job.seconds(job.settings) for job in jobs) / sum(job.best() for job in jobs)
    assert joint <= 1.03


def test_a_job_that_ends_in_the_middle_of_a_search_leaves_its_turn_to_others() -> None:
    first, second = AnalyticJob(), AnalyticJob()
    tuner = first.tuner()
    first.run(tuner, lambda: first.iterations == 2 * START_UP)
    assert tuner.searching
    tuner.close()
    assert not second.tune().searching

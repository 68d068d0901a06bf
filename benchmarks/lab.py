"""The lab: shaped hosts, workers of every engine that is needed, and one measurement at a time."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from statistics import fmean
from typing import Any

from benchmarks.engines import engine_pool
from benchmarks.errors import BenchmarkError
from benchmarks.job import Job
from benchmarks.network import Network, namespaces
from benchmarks.pool import Pool
from benchmarks.systems import find

TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 900.0
TURNS_TIMEOUT_S = 1800.0
SLOWEST = 12.0
"""A measurement may take this many times its compute before it is given up."""


class Lab:
    """Measures systems on jobs; make it with :func:`open_lab`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._pools: dict[str, tuple[Pool, AbstractContextManager[Pool]]] = {}

    @property
    def workers(self) -> int:
        return len(self._network.workers)

    def shape(self, bytes_per_second: float) -> None:
        """Set the rate of every link in both directions."""
        self._network.shape(bytes_per_second)

    def measure(
        self,
        system: str,
        job: Job,
        settings: Mapping[str, Any],
        *,
        warmup: int = 2,
        iterations: int = 5,
    ) -> float:
        """Seconds per iteration: the mean over ``iterations``, of the slowest rank.

        Raises:
            BenchmarkError: the system failed; its workers are gone, others are unharmed.
        """
        compute_s = sum(layer.forward_s + layer.backward_s for layer in job.layers)
        timeout_s = TIMEOUT_S + SLOWEST * compute_s * (warmup + iterations)
        work = {"job": job.to_json(), "warmup": warmup, "iterations": iterations}
        return _slowest(self._do("measure", system, settings, work, timeout_s))

    def turns(
        self,
        contestants: Mapping[str, tuple[str, Mapping[str, Any]]],
        task: str,
        *,
        turns: int,
        warmup: int,
        iterations: int,
    ) -> dict[str, list[float]]:
        """As :meth:`measure`, for systems that take turns on one real task in the same processes.

        The task is one of :mod:`benchmarks.tasks`. A turn may be as short as a second, so that
        what the machine does meanwhile hits all alike.
        Those that learn do so before the first turn. All must have one engine.

        Args:
            contestants: system and settings of each, by any name.

        Returns:
            Seconds per iteration of each turn, of the slowest rank.

        Raises:
            BenchmarkError: a system failed; its workers are gone, others are unharmed.
        """
        engines = {find(system).engine for system, _ in contestants.values()}
        if len(engines) > 1:
            raise ValueError(f"they must have one engine, got {sorted(engines)}")
        environments = [find(system).environment(own) for system, own in contestants.values()]
        key = json.dumps([*engines, dict(ChainMap(*environments))])
        command = {
            "do": "turns",
            "contestants": contestants,
            "task": task,
            "turns": turns,
            "warmup": warmup,
            "iterations": iterations,
        }
        answers = [answer["seconds"] for answer in self._call(key, command, TURNS_TIMEOUT_S)]
        return {
            name: [max(ranks) for ranks in zip(*(a[name] for a in answers), strict=True)]
            for name in contestants
        }

    def settle(
        self, system: str, job: Job, settings: Mapping[str, Any], *, times: int = 1
    ) -> list[dict[str, Any]]:
        """Let a system that learns do so, on this job, so many times in one session.

        Returns:
            What rank 0 saw: see ``Session.settle``.

        Raises:
            BenchmarkError: the system failed or did not end in time.
        """
        work = {"job": job.to_json(), "times": times}
        return self._do("settle", system, settings, work, SETTLE_TIMEOUT_S)[0]["history"]

    def layers_of(self, task: str) -> list[dict[str, Any]]:
        """Layers of a real task, with their times on rank 0."""
        answers = self._pool(self._key("ddp", {})).call({"do": "layers", "task": task}, TIMEOUT_S)
        return answers[0]["layers"]

    def _do(
        self,
        what: str,
        system: str,
        settings: Mapping[str, Any],
        work: Mapping[str, Any],
        timeout_s: float,
    ) -> list[dict[str, Any]]:
        command = {"do": what, "system": system, "settings": dict(settings), **work}
        return self._call(self._key(system, settings), command, timeout_s)

    def _call(self, key: str, command: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Answers of all ranks; after a failure the workers are gone."""
        try:
            return self._pool(key).call(command, timeout_s)
        except BenchmarkError:
            self._end(key)
            raise

    def forget(self, system: str, settings: Mapping[str, Any]) -> None:
        """End the processes that only these settings need, if there are any."""
        if find(system).environment(settings):
            self._end(self._key(system, settings))

    def close(self) -> None:
        """End all processes."""
        with ExitStack() as stack:
            for _, context in self._pools.values():
                stack.push(context)
            self._pools = {}

    def _key(self, system: str, settings: Mapping[str, Any]) -> str:
        chosen = find(system)
        return json.dumps([chosen.engine, chosen.environment(settings)])

    def _pool(self, key: str) -> Pool:
        if key not in self._pools:
            engine, environment = json.loads(key)
            context = engine_pool(engine, self._network.hub, self._network.workers, environment)
            self._pools[key] = (context.__enter__(), context)
        return self._pools[key][0]

    def _end(self, key: str) -> None:
        _, context = self._pools.pop(key, (None, None))
        if context is not None:
            context.__exit__(None, None, None)


def _slowest(answers: Sequence[Mapping[str, Any]]) -> float:
    return max(fmean(answer["seconds"]) for answer in answers)


@contextmanager
def open_lab(workers: int) -> Iterator[Lab]:
    """A lab with one host per worker, taken down at the end, whatever happens.

    Raises:
        BenchmarkError: namespaces cannot be made here.
    """
    with namespaces(workers) as network:
        lab = Lab(network)
        try:
            yield lab
        finally:
            lab.close()

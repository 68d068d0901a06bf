"""A worker of the lab: obeys the commands of :class:`benchmarks.pool.Pool`, one after the other.

``hello`` joins the engine; ``measure`` runs one system on one job and answers with the seconds per
iteration. Answers go to the real standard output; whatever libraries print goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from statistics import fmean
from typing import IO, Any

from benchmarks.job import Job
from benchmarks.link import Watch
from benchmarks.processes import die_with_parent
from benchmarks.systems import find
from benchmarks.systems.base import Session

Answer = dict[str, Any]


def main() -> None:
    """Read commands until standard input ends."""
    die_with_parent()
    answers = _private_stdout()
    for line in sys.stdin:
        print(json.dumps(_obey(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # engines' threads may wait for each other in their destructors


def _private_stdout() -> IO[str]:
    """Keep standard output for answers; send what others print to standard error."""
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine


def _obey(command: Mapping[str, Any]) -> Answer:
    try:
        return {
            "hello": _hello,
            "measure": _measure,
            "turns": _turns,
            "settle": _settle,
            "train": _train,
            "layers": _layers,
        }[command["do"]](command)
    except Exception as error:  # the answer is how the command's driver learns of any failure
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _hello(_: Mapping[str, Any]) -> Answer:
    _JOIN[os.environ["BENCHMARK_ENGINE"]]()
    return {}


def _join_gloo() -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")


def _join_horovod() -> None:
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()


def _join_kvstore() -> None:
    from benchmarks.systems.kvstore import store

    store()


def _join_servers() -> None:
    import torch

    torch.set_num_threads(1)


def _join_tensorflow() -> None:
    import bytescheduler.tensorflow  # noqa: F401 - declares the cluster
    from benchmarks.systems.tensorflow import limit_threads

    limit_threads()


def _join_mirrored() -> None:
    from benchmarks.systems.tensorflow import strategy

    strategy()


_JOIN: dict[str, Callable[[], None]] = {
    "gloo": _join_gloo,
    "horovod": _join_horovod,
    "kvstore": _join_kvstore,
    "servers": _join_servers,
    "tensorflow": _join_tensorflow,
    "mirrored": _join_mirrored,
}


def _train(command: Mapping[str, Any]) -> Answer:
    from benchmarks.training import obey

    return obey(command)


def _layers(command: Mapping[str, Any]) -> Answer:
    from benchmarks.layer_times import layer_rows
    from benchmarks.tasks import REAL_TASKS

    return {"layers": layer_rows(*REAL_TASKS[command["task"]]())}


def _measure(command: Mapping[str, Any]) -> Answer:
    system = find(command["system"])
    session = _open(system, command)
    try:
        return _timed(session, command)
    finally:
        session.close()


def _timed(session: Session, command: Mapping[str, Any]) -> Answer:
    _warm_up(session, command)
    if "watch" not in command:
        return {"seconds": _time(session, command["iterations"])}
    with Watch(command["watch"]) as watch:
        seconds = _time(session, command["iterations"])
    return {"seconds": seconds, "link": watch.readings}


def _warm_up(session: Session, command: Mapping[str, Any]) -> None:
    for _ in range(command["warmup"]):
        session.iterate()


def _turns(command: Mapping[str, Any]) -> Answer:
    """Seconds per iteration of several systems that are open at once, in short turns."""
    seconds: dict[str, list[float]] = {name: [] for name in command["contestants"]}
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for name, (system, settings) in command["contestants"].items():
            session = _open(find(system), {"task": command["task"], "settings": settings})
            stack.callback(session.close)
            session.settle()
            sessions[name] = session
        for _ in range(command["turns"]):
            for name, session in sessions.items():
                _warm_up(session, command)
                seconds[name].append(fmean(_time(session, command["iterations"])))
    return {"seconds": seconds}


def _settle(command: Mapping[str, Any]) -> Answer:
    session = _open(find(command["system"]), command)
    try:
        return {"history": [e for _ in range(command["times"]) for e in session.settle()]}
    finally:
        session.close()


def _open(system: Any, command: Mapping[str, Any]) -> Session:
    if "task" in command:
        from benchmarks.tasks import REAL_TASKS

        return system.open_task(*REAL_TASKS[command["task"]](), command["settings"])
    return system.open(Job.from_json(command["job"]), command["settings"])


def _time(session: Session, iterations: int) -> list[float]:
    """Seconds of each iteration, start to start, before a last one."""
    begins: list[float] = []
    for _ in range(iterations):
        begins.append(time.perf_counter())
        session.iterate()
    begins.append(time.perf_counter())
    return [later - earlier for earlier, later in pairwise(begins)]


if __name__ == "__main__":
    main()

"""Real ranks for tests: processes that stay, joined by Gloo over loopback, driven by pipes.

Starting PyTorch takes seconds, so the processes of a ``RankPool`` run one scenario after another.
A scenario is a module-level function; it runs on all ranks at once and returns something picklable.
A pool whose ranks do not answer in time, or die, is killed with everything in it.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from bytescheduler._ports import free_port

PATIENCE = 60.0  # seconds until a scenario counts as hung
START = 120.0  # seconds for the ranks to import PyTorch and meet


class RankError(AssertionError):
    """A scenario raised on some rank; carries the original by rank."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        self.kinds = {rank: kind for rank, (kind, _, _) in errors.items()}
        self.messages = {rank: text for rank, (_, text, _) in errors.items()}
        super().__init__(
            "\n".join(f"rank {rank}: {trace}" for rank, (_, _, trace) in errors.items())
        )


class RankPool:
    """``world_size`` processes in one process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._members: list[tuple[Any, Connection]] = []

    def run(self, scenario: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> list[Any]:
        """Run ``scenario(rank, *args)`` on every rank; return the results by rank."""
        if not self._members:
            self._start()
        for _, pipe in self._members:
            pipe.send((scenario, args))
        answers = [self._answer(rank, timeout) for rank in range(self.world_size)]
        errors = {rank: value for rank, (kind, value) in enumerate(answers) if kind == "error"}
        if errors:
            self.stop()  # its ranks may be in different places
            raise RankError(errors)
        return [value for _, value in answers]

    def stop(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()
        self._members.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append((process, ours))
        for rank in range(self.world_size):
            assert self._answer(rank, START) == ("value", "ready")

    def _answer(self, rank: int, timeout: float) -> tuple[str, Any]:
        pipe = self._members[rank][1]
        try:
            if pipe.poll(timeout):
                return pipe.recv()
        except EOFError:
            return "error", ("EOFError", "the process died", "the process died")
        return "error", ("TimeoutError", "no answer", f"no answer within {timeout} s: it hangs")


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        BYTESCHEDULER_CHECK="1",
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipe.send(("value", "ready"))
    while True:
        try:
            scenario, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            pipe.send(("value", scenario(rank, *args)))
        except BaseException as error:
            pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))

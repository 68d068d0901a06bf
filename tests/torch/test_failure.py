"""However a rank ends, the others end too, within seconds, and say who was lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from bytescheduler._ports import free_port
from bytescheduler.exceptions import TransportError
from bytescheduler.transports import torch_distributed
from bytescheduler.transports.torch_distributed import TorchDistributedTransport

pytestmark = pytest.mark.multiprocess
WORKER = Path(__file__).with_name("failing_worker.py")
START = 90.0  # seconds to import PyTorch on a busy machine
STOP = 10.0  # seconds that the others may take


class Job:
    """Ranks as plain processes, without a launcher that would kill the rest by itself."""

    def __init__(self, world_size: int, *arguments: str) -> None:
        port = str(free_port())
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(WORKER), *arguments],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()

    def wait_until_training(self) -> None:
        for rank in self.ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline().strip() == "trains"

    def end(self, rank: int, timeout: float) -> tuple[int, str, str]:
        out, err = self.ranks[rank].communicate(timeout=timeout)
        return self.ranks[rank].returncode, out, err


def survivors_end(job: Job, lost: int) -> list[str]:
    """Wait for the lost rank, then for the others, within their time; return their errors."""
    job.ranks[lost].wait(START)
    limit = time.monotonic() + STOP
    errors = []
    for rank in range(len(job.ranks)):
        if rank != lost:
            code, _, err = job.end(rank, max(0.1, limit - time.monotonic()))
            assert code != 0
            errors.append(err)
    return errors


@pytest.mark.parametrize(
    ("how", "lost"),
    [("kill", 0), ("kill", 1), ("kill-later", 0), ("kill-later", 2), ("raise", 1), ("leave", 0)],
)
@pytest.mark.parametrize("mode", ["priority", "barrier"])
def test_the_others_stop_and_name_who_is_gone(how, lost, mode):
    with Job(3, how, str(lost), mode) as job:
        job.wait_until_training()
        for error in survivors_end(job, lost):
            assert "PeerLostError" in error
            assert f"rank {lost}" in error.split("PeerLostError")[-1]


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("mode", ["priority", "barrier"])
def test_freezing_parameters_on_one_rank_alone_ends_every_rank(who, mode):
    with Job(3, "freeze", str(who), mode) as job:
        job.wait_until_training()
        errors = [*survivors_end(job, who), job.end(who, STOP)[2]]
        words = [error.split("bytescheduler.exceptions.")[-1] for error in errors]
        ours = ("RankMismatchError", "PeerLostError")
        assert all(word.startswith(ours) for word in words), errors
        rule = "the set of trainable parameters must change on all ranks alike"
        assert any(word.startswith("RankMismatchError") and rule in word for word in words)


def after_a_failure_on_rank_1(rank: int) -> str:
    transport = TorchDistributedTransport()
    transport.check()
    dist.barrier()
    if rank == 1:
        transport._witness()
    dist.barrier()
    with pytest.raises(TransportError) as seen:
        transport.check()
    transport.close()
    return str(seen.value)


def test_a_failure_that_one_rank_has_seen_ends_the_waits_of_all(two_ranks):
    texts = two_ranks.run(after_a_failure_on_rank_1)
    two_ranks.stop()  # the groups of a failure stay open
    assert all("has seen it fail" in text for text in texts)


class Looking(TorchDistributedTransport):
    """Counts the looks of a rank that waits."""

    looks = 0

    def check(self, steps: int = 0) -> None:
        super().check(steps)
        self.looks += 1
        self._store.set(f"looked {self.looks} times", "")


def late_to_an_exchange(rank: int) -> list[bytes]:
    torch_distributed.PULSE = timedelta(milliseconds=10)
    transport = Looking()
    if rank == 1:
        transport._store.wait(["looked 10 times"], timedelta(seconds=STOP))
    answers = transport.exchange(str(rank).encode())
    transport.close()
    return answers


def test_a_rank_that_is_late_to_an_exchange_is_waited_for(two_ranks):
    assert two_ranks.run(late_to_an_exchange) == [[b"0", b"1"]] * 2
    two_ranks.stop()  # their patience was changed


@pytest.mark.parametrize("mode", ["priority", "barrier"])
def test_ctrl_c_ends_every_rank(mode):
    with Job(2, "interrupt", "1", mode) as job:
        job.wait_until_training()
        (error,) = survivors_end(job, 1)
        assert "PeerLostError" in error
        assert "KeyboardInterrupt" in job.end(1, STOP)[2]


@pytest.mark.parametrize("mode", ["priority", "barrier"])
def test_a_signal_from_the_terminal_reaches_all_and_all_end(mode):
    with Job(2, "forever", "-1", mode) as job:
        job.wait_until_training()
        for rank in job.ranks:
            rank.send_signal(signal.SIGINT)
        for rank in range(2):
            assert job.end(rank, STOP)[0] != 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("mode", ["priority", "barrier"])
def test_the_interpreter_exits_by_itself_without_a_call_before(first, mode):
    with Job(2, "finish", str(first), mode) as job:
        for rank in range(2):
            code, out, err = job.end(rank, START)
            assert (code, err) == (0, ""), err
            assert "threads" in out

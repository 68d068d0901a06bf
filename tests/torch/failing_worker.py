"""A training script that ends in some unfriendly way: ``failing_worker.py HOW [WHICH_RANK]``."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

import bytescheduler.torch as bs

HOW, WHO = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1
MODE = sys.argv[3] if len(sys.argv) > 3 else "priority"


def die(step: int, rank: int) -> None:
    if rank != WHO or step != 5:
        return
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "kill-later":  # at a random moment, from a thread
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if HOW == "raise":
        raise ValueError("the user's own mistake")
    if HOW == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if HOW == "leave":
        sys.exit(0)


def freeze(model: torch.nn.Sequential, step: int, rank: int) -> None:
    """On one rank alone."""
    if HOW == "freeze" and (step, rank) == (6, WHO):
        for parameter in model[1].parameters():
            parameter.requires_grad_(False)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    optimizer = bs.ScheduledOptimizer(
        torch.optim.SGD(model.parameters(), 0.01),
        model,
        partition_size="4KiB",
        credit_size="16KiB",
        mode=MODE,
    )
    steps = 10 if HOW == "finish" else 100_000
    for step in range(steps):
        freeze(model, step, rank)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        die(step, rank)
        optimizer.step()
        if step == 4:
            print("trains", flush=True)
    if HOW == "finish" and rank == WHO:
        dist.destroy_process_group()
    print("threads", [t.name for t in threading.enumerate()], flush=True)


main()

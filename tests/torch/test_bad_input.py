"""What cannot work is refused on every rank, with the rule, the value and the remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import SMALL, Case, Rows, classify, numbered, plain_loop, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytescheduler.torch as bs
from bytescheduler.exceptions import (
    ByteSchedulerError,
    ConfigurationError,
    RankMismatchError,
    UsageError,
)
from bytescheduler.transports.torch_distributed import TorchDistributedTransport

pytestmark = pytest.mark.multiprocess


def wrap(model: Any = None, optimizer: Any = None, **ours: Any) -> Any:
    model = Rows() if model is None else model
    optimizer = sgd(model.parameters()) if optimizer is None else optimizer
    return bs.ScheduledOptimizer(optimizer, model, **{**SMALL, **ours})


def refused(rank: int, name: str) -> tuple[str, str]:
    """The error of ``MISTAKES[name]``; afterwards everything works on these ranks."""
    error: ByteSchedulerError | None = None
    try:
        MISTAKES[name](rank)
    except ByteSchedulerError as caught:
        error = caught
    dist.barrier()
    model = Rows()
    with wrap(model) as optimizer:
        plain_loop(model, optimizer, numbered(Case(steps=2), rank), classify)
    return type(error).__name__, str(error)


def twice(rank: int) -> None:
    model = Rows()
    with wrap(model) as optimizer:
        wrap(model, optimizer)


def same_inner_twice(rank: int) -> None:
    model = Rows()
    inner = sgd(model.parameters())
    with wrap(model, inner):
        wrap(model, inner)


def on_two_devices(rank: int) -> None:
    model = Rows()
    model.head = nn.Linear(16, 4, device="meta")
    wrap(model)


def nothing_to_train(rank: int) -> None:
    model = Rows().requires_grad_(False)
    wrap(model)


def lazy(rank: int) -> None:
    wrap(nn.Sequential(nn.LazyLinear(4)))


def complex_numbers(rank: int) -> None:
    wrap(nn.Linear(2, 2, dtype=torch.complex64))


def deeper_on_rank_1(rank: int) -> None:
    wrap(nn.Sequential(nn.Linear(8, 4), *([nn.Linear(4, 4)] if rank == 1 else [])))


def wider_on_rank_1(rank: int) -> None:
    wrap(nn.Sequential(nn.Linear(8, 4 + rank)))


def other_dtype_on_rank_1(rank: int) -> None:
    wrap(nn.Linear(8, 4, dtype=torch.float64 if rank else torch.float32))


def other_names_on_rank_1(rank: int) -> None:
    wrap(nn.ModuleDict({f"layer{rank}": nn.Linear(8, 4)}))


def frozen_on_rank_1(rank: int) -> None:
    model = Rows()
    model.first.requires_grad_(rank == 0)
    wrap(model)


def other_buffer_on_rank_1(rank: int) -> None:
    model = Rows()
    model.register_buffer("extra", torch.zeros(3 + rank))
    wrap(model)


def other_optimizer_on_rank_1(rank: int) -> None:
    model = Rows()
    wrap(model, torch.optim.Adam(model.parameters()) if rank else sgd(model.parameters()))


def bad_on_rank_1(rank: int) -> None:
    model = Rows()
    wrap(model, sgd(Rows().parameters()) if rank else None)


MISTAKES: dict[str, Callable[[int], Any]] = {
    "partition zero": lambda rank: wrap(partition_size=0),
    "partition negative": lambda rank: wrap(partition_size=-4),
    "partition a fraction": lambda rank: wrap(partition_size=1.5),
    "partition a word": lambda rank: wrap(partition_size="much"),
    "credit zero": lambda rank: wrap(credit_size=0),
    "credit below a chunk": lambda rank: wrap(partition_size="2MiB", credit_size="1MiB"),
    "unknown mode": lambda rank: wrap(mode="fastest"),
    "unknown transport": lambda rank: wrap(transport="pigeon"),
    "group for another transport": lambda rank: wrap(transport="mpi", group=dist.group.WORLD),
    "twice": twice,
    "same inner twice": same_inner_twice,
    "swapped arguments": lambda rank: bs.ScheduledOptimizer(Rows(), sgd(Rows().parameters())),
    "model is a list": lambda rank: bs.ScheduledOptimizer(sgd(Rows().parameters()), [Rows()]),
    "DistributedDataParallel": lambda rank: wrap(DistributedDataParallel(Rows())),
    "another model's optimizer": lambda rank: wrap(Rows(), sgd(Rows().parameters())),
    "two devices": on_two_devices,
    "nothing to train": nothing_to_train,
    "lazy": lazy,
    "complex": complex_numbers,
    "deeper on rank 1": deeper_on_rank_1,
    "wider on rank 1": wider_on_rank_1,
    "other dtype on rank 1": other_dtype_on_rank_1,
    "other names on rank 1": other_names_on_rank_1,
    "frozen on rank 1": frozen_on_rank_1,
    "other buffer on rank 1": other_buffer_on_rank_1,
    "other optimizer on rank 1": other_optimizer_on_rank_1,
    "bad on rank 1": bad_on_rank_1,
    "other partition on rank 1": lambda rank: wrap(partition_size=512 << rank),
    "other mode on rank 1": lambda rank: wrap(mode="fifo" if rank else "priority"),
    "bad mode on rank 1": lambda rank: wrap(mode="fastest" if rank else "priority"),
    "bad size on rank 1": lambda rank: wrap(partition_size=-1 if rank else 512),
    "DistributedDataParallel on rank 1": lambda rank: wrap(
        DistributedDataParallel(Rows()) if rank else (DistributedDataParallel(Rows()), Rows())[1]
    ),
}
SAYS: dict[str, tuple[type[ByteSchedulerError], list[str]]] = {
    "partition zero": (ConfigurationError, ["partition_size", "positive", "0"]),
    "partition negative": (ConfigurationError, ["partition_size", "positive", "-4"]),
    "partition a fraction": (ConfigurationError, ["partition_size", "1.5"]),
    "partition a word": (ConfigurationError, ["partition_size", "much"]),
    "credit zero": (ConfigurationError, ["credit_size", "positive"]),
    "credit below a chunk": (ConfigurationError, ["credit_size", "2 MiB", "1 MiB"]),
    "unknown mode": (ConfigurationError, ["mode", "priority", "fastest"]),
    "unknown transport": (ConfigurationError, ["pigeon", "torch"]),
    "group for another transport": (ConfigurationError, ["group", "transport"]),
    "twice": (UsageError, ["wrapped once", "unwrap()"]),
    "same inner twice": (UsageError, ["wrapped once", "unwrap()"]),
    "swapped arguments": (ConfigurationError, ["optimizer", "Rows"]),
    "model is a list": (ConfigurationError, ["model", "list"]),
    "DistributedDataParallel": (UsageError, ["DistributedDataParallel", "model.module"]),
    "another model's optimizer": (UsageError, ["the model's", "model.parameters()"]),
    "two devices": (UsageError, ["one device", "meta"]),
    "nothing to train": (UsageError, ["at least one parameter"]),
    "lazy": (UsageError, ["0.weight", "lazy"]),
    "complex": (UsageError, ["weight", "complex64"]),
    "deeper on rank 1": (RankMismatchError, ["1.weight", "rank 1", "rank 0"]),
    "wider on rank 1": (RankMismatchError, ["0.weight", "(5, 8)", "(4, 8)"]),
    "other dtype on rank 1": (RankMismatchError, ["weight", "float64", "float32"]),
    "other names on rank 1": (RankMismatchError, ["layer0.weight", "layer1.weight"]),
    "frozen on rank 1": (RankMismatchError, ["first.weight", "rank 1"]),
    "other buffer on rank 1": (RankMismatchError, ["extra", "rank 1"]),
    "other optimizer on rank 1": (RankMismatchError, ["Adam", "SGD"]),
    "other partition on rank 1": (RankMismatchError, ["partition_size", "1024", "512"]),
    "other mode on rank 1": (RankMismatchError, ["mode", "fifo", "priority"]),
}


@pytest.mark.parametrize("name", SAYS)
def test_mistakes_are_refused_on_every_rank(two_ranks, name):
    kind, words = SAYS[name]
    for error, text in two_ranks.run(refused, name):
        assert error == kind.__name__, text
        assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bad on rank 1", "the model's"),
        ("bad mode on rank 1", "fastest"),
        ("bad size on rank 1", "partition_size"),
        ("DistributedDataParallel on rank 1", "DistributedDataParallel"),
    ],
)
def test_a_mistake_of_one_rank_is_told_to_all(two_ranks, name, words):
    (kind, text), (own_kind, own_text) = two_ranks.run(refused, name)
    assert kind == "RankMismatchError"
    assert "rank 1" in text
    assert words in text
    assert own_kind in ("UsageError", "ConfigurationError")
    assert words in own_text


def outside_of_the_group(rank: int) -> str:
    group = dist.new_group([0])
    model = Rows()
    if rank == 0:
        with wrap(model, group=group):
            return ""
    with pytest.raises(ByteSchedulerError) as caught:
        wrap(model, group=group)
    return str(caught.value)


def test_a_rank_outside_of_the_group_is_refused(two_ranks):
    inside, outside = two_ranks.run(outside_of_the_group)
    assert inside == ""
    assert "not a member" in outside


def unequal_passes(rank: int) -> str:
    """Rank 1 runs one backward more, without no_sync."""
    model = Rows()
    data = numbered(Case(steps=6), rank)
    optimizer = wrap(model)
    try:
        for batch in data:
            optimizer.zero_grad()
            for _ in range(2 if rank == 1 and batch[-1] == 2 else 1):
                classify(model, batch).backward()
            optimizer.step()
        optimizer.synchronize()
    except ByteSchedulerError as error:
        return type(error).__name__ + ": " + str(error)
    return ""


def test_unequal_numbers_of_backward_passes_are_named(two_ranks):
    texts = two_ranks.run(unequal_passes)
    two_ranks.stop()
    assert any("no_sync" in text for text in texts)
    assert all(texts), texts


SCRIPT = """
import torch, bytescheduler.torch as bs
model = torch.nn.Linear(2, 2)
bs.ScheduledOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
"""


def test_a_process_group_that_is_not_initialised_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "UsageError" in done.stderr
    assert "init_process_group" in done.stderr


def on_a_gpu_over_gloo(rank: int) -> str:
    with pytest.raises(UsageError) as refused:
        TorchDistributedTransport(device="cuda:0")
    return str(refused.value)


def test_gradients_on_a_gpu_are_refused_where_there_is_no_nccl(two_ranks):
    for text in two_ranks.run(on_a_gpu_over_gloo):
        assert "cuda:0" in text
        assert "nccl" in text


GROUP = """
import sys, torch, torch.distributed as dist, bytescheduler.torch as bs
dist.init_process_group(*sys.argv[1:], store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = bs.ScheduledOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.unwrap()
"""


@pytest.mark.parametrize("backend", [[], ["cpu:gloo"]], ids=["none named", "by device"])
def test_a_group_with_a_backend_for_each_device_will_do(backend):
    done = subprocess.run(
        [sys.executable, "-c", GROUP, *backend],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

"""Tuning in real training: by default, and with the weights of an untuned run, to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bytescheduler._ports import free_port
from bytescheduler.core.config import CHUNKS_PER_CREDIT

pytest.importorskip("torch")

SOURCE = Path(__file__).resolve().parents[2] / "src"
STEPS = 150

TRAIN = """
import hashlib, json, sys
import torch
import torch.distributed as dist
from torch import nn
import bytescheduler.torch as bs
from bytescheduler.torch import tuner

told = {}
make_tuner = tuner.make_tuner
tuner.make_tuner = lambda settings, **facts: told.update(facts) or make_tuner(settings, **facts)

case, steps, output = sys.argv[1], int(sys.argv[2]), sys.argv[3]
mode = case if case == "priority" else None
torch.use_deterministic_algorithms(case == "deterministic")
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
optimizer = bs.ScheduledOptimizer(optimizer, model, mode=mode)
generator = torch.Generator().manual_seed(dist.get_rank())
used = set()
for _ in range(steps):
    x = torch.randn(8, 16, generator=generator)
    y = torch.randint(0, 4, (8,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    settings = optimizer.settings
    used.add((settings.mode, settings.partition_size, settings.credit_size))
optimizer.unwrap()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
result = {"weights": digest.hexdigest(), "used": sorted(used), "told": told}
with open(f"{output}.{dist.get_rank()}", "w") as file:
    json.dump(result, file)
dist.destroy_process_group()
"""


def train(folder: Path, case: str) -> list[dict[str, object]]:
    """Train on two ranks; what each of them found."""
    script, output = folder / "train.py", folder / case
    script.write_text(TRAIN)
    shared = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    command = [sys.executable, str(script), case, str(STEPS), str(output)]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(timeout=160) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.multiprocess
@pytest.mark.timeout(360)
def test_weights_while_tuning_equal_those_of_the_untuned_run(tmp_path: Path) -> None:
    tuned, plain = train(tmp_path, "default"), train(tmp_path, "priority")
    weights = {str(rank["weights"]) for rank in (*tuned, *plain)}
    assert len(weights) == 1
    used = [rank["used"] for rank in tuned]
    assert all(isinstance(settings, list) and len(settings) >= 4 for settings in used)
    modes = {settings[0] for settings in used[1]}  # type: ignore[attr-defined]
    assert {"barrier", "priority"} <= modes
    leader, follower = (rank["told"] for rank in tuned)
    assert isinstance(leader, dict)
    assert (leader["engine"], leader["device"], leader["world_size"]) == ("torch", "cpu", 2)
    assert 1e6 < leader["bandwidth"] < 1e11
    assert follower == {}


@pytest.mark.multiprocess
@pytest.mark.timeout(360)
def test_where_runs_shall_be_reproducible_nothing_is_measured(tmp_path: Path) -> None:
    for rank in train(tmp_path, "deterministic"):
        (settings,) = rank["used"]  # type: ignore[misc]
        mode, partition_size, credit_size = settings
        assert (mode, credit_size) == ("priority", CHUNKS_PER_CREDIT * partition_size)

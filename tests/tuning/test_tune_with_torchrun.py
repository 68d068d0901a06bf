"""``bytescheduler tune`` over a real launcher, real workers and the real adapter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from leftovers import left_behind

from bytescheduler.cli import main

pytest.importorskip("torch")
for module in ("skopt", "rich", "matplotlib"):
    pytest.importorskip(module)

SOURCE = Path(__file__).resolve().parents[2] / "src"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

TRAIN = """
import subprocess, sys
import torch
import torch.distributed as dist
import bytescheduler.torch as bs

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = bs.ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
if optimizer.settings.mode == "barrier" and dist.get_rank() == 1:
    stray = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", stray], start_new_session=True)
    sys.exit("no barrier on this rank")
while True:
    optimizer.zero_grad()
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.multiprocess
def test_an_endless_job_is_tuned_and_a_crash_of_one_rank_counts_as_a_failed_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    script, output = tmp_path / "train.py", tmp_path / "tuned.json"
    script.write_text(TRAIN)
    options = ["--trials", "2", "--output", str(output)]
    assert main(["tune", *options, "--", *LAUNCHER, str(script)]) == 0
    found = json.loads(output.read_text())
    works, fails = found["trials"]
    assert (works["mode"], fails["mode"]) == ("priority", "barrier")
    assert 0 < works["iteration_s"] < 60
    assert fails["iteration_s"] is None
    assert "no barrier on this rank" in fails["failure"]
    assert found["best"] == works
    assert found["total_bytes"] == 4 * (64 * 64 + 64)
    assert not left_behind(tmp_path)

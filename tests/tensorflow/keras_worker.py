"""One rank: ``keras_worker.py MODE FOLDER``, with a mode of ``checks``, ``servers`` and ``victim``.

``checks`` runs the checks of ``checks.py`` and writes a report per rank; the last rank runs those
that need no other rank while the others have ended. ``servers`` trains over parameter servers.
``victim`` trains for ever; rank 1 kills
itself after some steps, and the others report what they were told, and when.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import checks

import bytescheduler.tensorflow as bs

KILL_AT = 5


def run_checks(folder: Path) -> None:
    last = bs.rank() == bs.world_size() - 1
    report: dict[str, str] = {}
    for check in (*checks.TOGETHER, *(checks.ALONE if last else ())):
        report[check.__name__] = _verdict(check)
        _save(folder, report)
        if check in checks.TOGETHER and report[check.__name__] != "ok":
            return  # the ranks have lost step


def _verdict(check: checks.Check) -> str:
    begin = time.perf_counter()
    try:
        check()
    except Exception:
        return traceback.format_exc()
    finally:
        print(f"{check.__name__}: {time.perf_counter() - begin:.1f} s", flush=True)
    return "ok"


def run_servers(folder: Path) -> None:
    _save(folder, {"servers": _verdict(checks.over_parameter_servers)})


def run_victim(folder: Path) -> None:
    model = checks.dense()
    optimizer = bs.ScheduledOptimizer(checks.ko.SGD(0.01), model)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)

    class Die(checks.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == KILL_AT and bs.rank() == 1:
                _save(folder, {"killed": str(time.time())})
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        model.fit(checks.X, checks.Y, batch_size=1, epochs=10_000, verbose=0, callbacks=[Die()])
    except Exception as error:
        _save(folder, {"at": str(time.time()), "said": f"{type(error).__name__}: {error}"})
        raise


def _save(folder: Path, report: dict[str, str]) -> None:
    (folder / f"{bs.rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    modes = {"checks": run_checks, "servers": run_servers, "victim": run_victim}
    modes[sys.argv[1]](Path(sys.argv[2]))

"""One rank of the contract suite, as a process: ``worker.py ENGINE FOLDER [PROBE VICTIM]``.

Runs every check and writes, after each, its own report ``FOLDER/<rank>.json``: check name to
``ok`` or a traceback. After the first failure the others are not run, since the ranks may have
lost step; a check that is begun and never ends is named in the report too.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contract
import engines
from contract import Bench

BEGUN = "begun, and never ended"


def run_checks(bench: Bench, save: Callable[[dict[str, str]], None]) -> dict[str, str]:
    report: dict[str, str] = {}
    for check in contract.CHECKS:
        report[check.__name__] = BEGUN
        save(report)
        try:
            check(bench)
        except BaseException:
            report[check.__name__] = traceback.format_exc()
            break
        finally:
            save(report)
        report[check.__name__] = "ok"
    save(report)
    return report


def run_probe(bench: Bench, name: str, victim: int) -> dict[str, str]:
    try:
        return {name: getattr(contract, name)(bench, victim)}
    except BaseException:
        return {name: traceback.format_exc()}


def main(engine: str, folder: Path, probe: str | None = None, victim: int = 0) -> int:
    bench = engines.OPENERS[engine]()
    path = folder / f"{bench.rank}.json"

    def save(report: dict[str, Any]) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(report))
        temporary.replace(path)

    if probe is None:
        report = run_checks(bench, save)
        return 0 if set(report.values()) == {"ok"} else 1
    bench.testament = lambda text: save({probe: text})
    save(run_probe(bench, probe, victim))
    return 0


if __name__ == "__main__":
    _, name, where, *rest = sys.argv
    sys.exit(main(name, Path(where), *rest[:1], *map(int, rest[1:])))

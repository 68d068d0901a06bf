"""A picture of what ``bytescheduler tune`` found: expected iteration time over both sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bytescheduler._imports import require
from bytescheduler.core.config import Mode, format_size
from bytescheduler.tuning.offline import Study, model_of
from bytescheduler.tuning.space import CREDITS_IN_PARTITIONS, SCHEDULES

__all__ = ["draw_surface"]


def draw_surface(study: Study, path: Path) -> Path:
    """Draw one map per schedule, trials as dots, and return ``path``.

    The study must hold a trial that succeeded.
    """
    matplotlib = require("matplotlib", extra="tune")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", extra="tune")
    figure, panels = pyplot.subplots(
        1, len(SCHEDULES), figsize=(12, 3.6), sharey=True, layout="constrained"
    )
    maps = {mode: _surface(study, mode) for mode in SCHEDULES}
    low = min(float(np.min(values)) for values in maps.values())
    high = max(float(np.max(values)) for values in maps.values())
    image: Any = None
    for panel, (mode, values) in zip(panels, maps.items(), strict=True):
        image = panel.imshow(
            values, origin="lower", aspect="auto", vmin=low, vmax=high, cmap="viridis_r"
        )
        _label(panel, study, mode)
        _dots(panel, study, mode)
    figure.colorbar(image, ax=list(panels), label="expected ms per iteration")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _partitions(study: Study) -> list[int]:
    """The columns: every size that was or could be tried, evenly spaced whatever their ratio."""
    tried = [outcome.settings for outcome in study.outcomes]
    return sorted({settings.partition_size for settings in (*study.candidates(), *tried)})


def _surface(study: Study, mode: Mode) -> Any:
    """Expected milliseconds, shape (credits, partitions)."""
    model, space = model_of(study)
    points = [
        [float(np.log2(size)), float(np.log2(count)), mode]
        for count in CREDITS_IN_PARTITIONS
        for size in _partitions(study)
    ]
    mean = np.exp(model.predict(space.transform(points))) * 1e3
    return mean.reshape(len(CREDITS_IN_PARTITIONS), -1)


def _label(panel: Any, study: Study, mode: str) -> None:
    sizes = _partitions(study)
    panel.set_title(mode)
    panel.set_xticks(range(len(sizes)), [format_size(size) for size in sizes], rotation=90)
    panel.set_yticks(range(len(CREDITS_IN_PARTITIONS)), [str(n) for n in CREDITS_IN_PARTITIONS])
    panel.set_xlabel("partition size")
    panel.set_ylabel("credit in partitions")


def _dots(panel: Any, study: Study, mode: str) -> None:
    columns = {size: index for index, size in enumerate(_partitions(study))}
    for outcome in study.outcomes:
        settings = outcome.settings
        if settings.mode != mode:
            continue
        x = columns[settings.partition_size]
        y = np.log2(settings.credit_size / settings.partition_size)
        best = outcome is study.best
        panel.plot(x, y, "*" if best else "o" if outcome.seconds else "x", color="red")

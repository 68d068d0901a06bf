"""Tables, progress bars and pictures of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.systems import OURS

OUR_COLOUR, PEER_COLOUR = "#2b6cb0", "#a0aec0"


def console() -> Console:
    """Where people read."""
    return Console(highlight=False)


def track() -> Progress:
    """A progress bar on standard error."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def comparison_table(result: dict[str, Any]) -> Table:
    """One cell: every system's median beside limit and bound."""
    table = Table(title=describe(result), caption=_caption(result))
    table.add_column("system")
    for heading in ("median ms", "spread", "of bound", "speed-up", "settings"):
        table.add_column(heading, justify="right")
    reference = _baseline(result)
    for name, entry in sorted(result["systems"].items(), key=lambda item: item[1]["median_s"]):
        seconds = entry["median_s"]
        spread = (max(entry["runs"]) - min(entry["runs"])) / seconds
        table.add_row(
            name,
            f"{seconds * 1e3:.0f}",
            f"{spread:.1%}",
            f"{seconds / result['bound_s']:.3f}",
            f"{reference / seconds:.2f}",
            ", ".join(f"{key} {value}" for key, value in entry["settings"].items()),
        )
    for name, reason in {**result["missing"], **result["failed"]}.items():
        table.add_row(
            name, "missing" if name in result["missing"] else "failed", "", "", "", reason
        )
    return table


def describe(result: dict[str, Any]) -> str:
    """The cell in a few words."""
    return f"{result['profile']}, {result['workers']} workers, balance {result['balance']:g}"


def _caption(result: dict[str, Any]) -> str:
    names = ("compute", "exchange", "side_by_side", "limit", "bound")
    times = {name: result.get(f"{name}_s") for name in names}
    return ", ".join(
        f"{name.replace('_', ' ')} {seconds * 1e3:.0f} ms"
        for name, seconds in times.items()
        if seconds is not None
    )


def _baseline(result: dict[str, Any]) -> float:
    """DistributedDataParallel's time, or the best peer's, or the slowest of all."""
    systems = result["systems"]
    if "ddp" in systems:
        return systems["ddp"]["median_s"]
    peer = best_peer(result)
    return systems[peer]["median_s"] if peer else max(e["median_s"] for e in systems.values())


def best_peer(result: dict[str, Any]) -> str | None:
    """The fastest system that is not ours."""
    peers = [name for name in result["systems"] if name not in OURS]
    return min(peers, key=lambda name: result["systems"][name]["median_s"], default=None)


def bars(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw iteration times of some cells beside their bounds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.5 * columns, 2.8 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, result in zip(axes.flat, results, strict=False):
        _bars_of(axis, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars_of(axis: Any, result: dict[str, Any]) -> None:
    systems = sorted(result["systems"].items(), key=lambda item: -item[1]["median_s"])
    names = [name for name, _ in systems]
    times = [entry["median_s"] * 1e3 for _, entry in systems]
    axis.barh(names, times, color=[OUR_COLOUR if name in OURS else PEER_COLOUR for name in names])
    axis.axvline(result["bound_s"] * 1e3, color="black", linewidth=1, label="structural bound")
    axis.set_title(describe(result), fontsize=9)
    axis.set_xlabel("ms per iteration", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7, loc="lower right")

"""Recorded timelines: read, checked against each other, merged, explained, drawn."""

from bytescheduler.tracing.analysis import Iteration, Summary, explain, summarise
from bytescheduler.tracing.checks import check
from bytescheduler.tracing.timeline import Span, Timeline, aligned, load, merge

__all__ = [
    "Iteration",
    "Span",
    "Summary",
    "Timeline",
    "aligned",
    "check",
    "explain",
    "load",
    "merge",
    "summarise",
]

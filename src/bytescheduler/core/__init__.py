"""The algorithm: plan, scheduler, order agreement. Imports no framework and no engine."""

from bytescheduler.core.config import Settings, parse_size, resolve_settings
from bytescheduler.core.exchange import Exchange
from bytescheduler.core.plan import Chunk, Layout, ParameterSpec, Plan, Span
from bytescheduler.core.scheduler import Scheduler
from bytescheduler.core.trace import Observer, TraceRecorder

__all__ = [
    "Chunk",
    "Exchange",
    "Layout",
    "Observer",
    "ParameterSpec",
    "Plan",
    "Scheduler",
    "Settings",
    "Span",
    "TraceRecorder",
    "parse_size",
    "resolve_settings",
]

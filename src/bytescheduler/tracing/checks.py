"""Do the timelines of several ranks belong together, and do they show what must be?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.tracing.timeline import Timeline

__all__ = ["check"]


def check(timelines: Sequence[Timeline]) -> list[str]:
    """What is wrong with these timelines as recordings of one job, in words; empty if nothing.

    Raises:
        ConfigurationError: they cannot be of one job: a rank twice, or different models.
    """
    _require_one_job(timelines)
    return [*_missing_ranks(timelines), *_empty(timelines), *_orders(timelines)]


def _require_one_job(timelines: Sequence[Timeline]) -> None:
    first = timelines[0]
    twice = [rank for rank, n in Counter(item.rank for item in timelines).items() if n > 1]
    if twice:
        raise ConfigurationError(
            f"each rank must be given once, got rank {twice[0]} twice; leave one of its files out"
        )
    for other in timelines[1:]:
        if (other.world_size, other.parameters) != (first.world_size, first.parameters):
            raise ConfigurationError(
                f"{first.path} and {other.path} must be of one job, but their models or world "
                "sizes differ; give the files of one run"
            )


def _missing_ranks(timelines: Sequence[Timeline]) -> list[str]:
    world_size = timelines[0].world_size
    missing = sorted(set(range(world_size)) - {item.rank for item in timelines})
    if not missing:
        return []
    names = ", ".join(map(str, missing))
    return [f"of {world_size} ranks these are missing: {names}"]


def _empty(timelines: Sequence[Timeline]) -> list[str]:
    return [
        f"rank {item.rank} sent nothing"
        for item in timelines
        if not item.lane("network") and item.world_size > 1
    ]


def _orders(timelines: Sequence[Timeline]) -> list[str]:
    """All ranks must start the same chunks in the same order, unless the engine negotiates.

    Recordings may end a few chunks apart, so that the common length is compared.
    """
    first, *others = timelines
    if first.negotiated:
        return []
    ours = [span.chunk for span in first.lane("network")]
    problems: list[str] = []
    for other in others:
        theirs = [span.chunk for span in other.lane("network")]
        pairs = enumerate(zip(ours, theirs, strict=False))
        differing = next((n for n, (one, two) in pairs if one != two), None)
        if differing is not None:
            problems.append(
                f"ranks {first.rank} and {other.rank} started different chunks as number "
                f"{differing}: {ours[differing]} and {theirs[differing]}"
            )
    return problems

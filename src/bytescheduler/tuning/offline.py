"""The offline search: trials of a launch command, kept in a file so that it can go on later.

The file holds every trial and is replaced atomically after each one: an interruption costs one
trial at most. The next settings follow from the trials alone, by scikit-optimize's Gaussian process
and expected improvement over the same candidates as online, so a search that was interrupted goes
on exactly as if it had not been.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bytescheduler._imports import require
from bytescheduler.core.config import (
    ENV_CREDIT_SIZE,
    ENV_MODE,
    ENV_PARTITION_SIZE,
    Settings,
    format_size,
)
from bytescheduler.exceptions import ConfigurationError, UsageError
from bytescheduler.tuning.space import SCHEDULES, Space
from bytescheduler.tuning.trials import UNWRAPPED, Trial, run_trial

__all__ = ["Outcome", "Study", "model_of"]

VERSION: Final = 1
FAILED: Final = 2.0  # a failed trial counts as this many times the slowest
HOPELESS: Final = 3  # trials, all failed, after which a search gives up
ADD_LINE: Final = "optimizer = bytescheduler.torch.ScheduledOptimizer(optimizer, model)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A trial as it is kept: seconds per iteration, or why there are none."""

    settings: Settings
    seconds: float | None
    failure: str | None = None


@dataclass(slots=True, kw_only=True)
class Study:
    """All trials of one command.

    Attributes:
        command: the launch command.
        path: where the trials are kept.
        total_bytes: bytes of all gradients; 0 before a trial has told.
        outcomes: the trials so far.
    """

    command: tuple[str, ...]
    path: Path
    total_bytes: int = 0
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    @classmethod
    def open(cls, path: Path, command: Sequence[str]) -> Study:
        """Go on with the study in ``path``, or begin one; nothing is written yet.

        Raises:
            ConfigurationError: ``path`` cannot be written, or holds something else.
        """
        _check_writable(path)
        study = cls(command=tuple(command), path=path)
        if path.exists():
            study._load()
        return study

    @property
    def best(self) -> Outcome | None:
        """The fastest trial."""
        done = [outcome for outcome in self.outcomes if outcome.seconds is not None]
        return min(done, key=lambda outcome: outcome.seconds or 0.0, default=None)

    def run(self, trials: int, timeout: float) -> Iterator[tuple[Settings, Outcome | None]]:
        """Run trials until there are ``trials``; yield settings before and with each outcome.

        Raises:
            UsageError: the command wraps no optimizer, overrides the settings, or always fails.
        """
        while len(self.outcomes) < trials:
            settings = self._next()
            yield settings, None
            trial = run_trial(self.command, settings, timeout)
            self._refuse(trial)
            if trial.report is not None:
                self.total_bytes = trial.report.total_bytes
            failure = _explained(trial) if trial.failure else None
            outcome = Outcome(settings=settings, seconds=trial.seconds, failure=failure)
            self.outcomes.append(outcome)
            self.save()
            yield settings, outcome

    def save(self) -> None:
        """Write the file, atomically."""
        best = self.best
        document = {
            "version": VERSION,
            "command": list(self.command),
            "total_bytes": self.total_bytes,
            "trials": [_as_json(outcome) for outcome in self.outcomes],
            "best": _as_json(best) if best else None,
            "environment": environment_lines(best.settings) if best else [],
        }
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def candidates(self) -> list[Settings]:
        """Everything that may be tried, for the model that was seen."""
        return Space(total_bytes=self.total_bytes, base=Settings()).candidates()

    def _next(self) -> Settings:
        if not self.total_bytes:
            return Settings() if not self.outcomes else replace(Settings(), mode="barrier")
        space = Space(total_bytes=self.total_bytes, base=Settings())
        used = [outcome.settings for outcome in self.outcomes]
        tried = [space.at(item.mode, item.partition_size, item.credit_size) for item in used]
        for settings in (*space.anchors, *space.first_guesses):
            if settings not in tried:
                return settings
        left = [settings for settings in space.candidates() if settings not in tried]
        if not left or self.best is None:
            return (left or tried)[0]
        return left[int(np.argmax(self._improvement(left)))]

    def _improvement(self, settings: Sequence[Settings]) -> npt.NDArray[np.float64]:
        acquisition = require("skopt.acquisition", extra="tune")
        model, space = model_of(self)
        best = float(np.log(min(value for value in _targets(self.outcomes))))
        points = space.transform([_point(item) for item in settings])
        return acquisition.gaussian_ei(points, model, y_opt=best)

    def _refuse(self, trial: Trial) -> None:
        """Stop where more trials would tell nothing."""
        first = not self.outcomes
        if first and (trial.failure or "").startswith(UNWRAPPED):
            raise UsageError(f"{_explained(trial)}\nAdd this line to the script: {ADD_LINE}")
        used = trial.report.settings if trial.report else trial.settings
        if first and used != trial.settings:
            raise UsageError(
                f"the script sets its own sizes or mode ({describe(used)} instead of "
                f"{describe(trial.settings)}); leave them out, so that the environment counts"
            )
        failures = [outcome.failure for outcome in self.outcomes] + [trial.failure]
        if len(failures) >= HOPELESS and all(failures):
            last = _explained(trial)
            raise UsageError(f"the first {len(failures)} trials failed, the last: {last}")

    def _load(self) -> None:
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            command = tuple(document["command"])
            outcomes = [_from_json(entry) for entry in document["trials"]]
            self.total_bytes = int(document["total_bytes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"--output {self.path} exists and holds no trials ({error}); name another file"
            ) from error
        if command != self.command:
            raise ConfigurationError(
                f"--output {self.path} holds trials of another command ({' '.join(command)}); "
                "name another file, or remove this one"
            )
        self.outcomes = outcomes


def model_of(study: Study) -> tuple[Any, Any]:
    """scikit-optimize's Gaussian process of log seconds, and the space it lives in."""
    spaces = require("skopt.space", extra="tune")
    utils = require("skopt.utils", extra="tune")
    sizes = np.log2([settings.partition_size for settings in study.candidates()])
    space = utils.normalize_dimensions(
        [
            spaces.Real(float(np.min(sizes)), float(np.max(sizes)) + 1e-6),
            spaces.Real(0.0, 4.0),
            spaces.Categorical(SCHEDULES),
        ]
    )
    model = utils.cook_estimator("GP", space=space, random_state=0, noise="gaussian")
    inside = [index for index, item in enumerate(study.outcomes) if item.settings.mode in SCHEDULES]
    points = space.transform([_point(study.outcomes[index].settings) for index in inside])
    targets = _targets(study.outcomes)
    with warnings.catch_warnings():  # a length scale at its limit is no news with a few points
        warnings.simplefilter("ignore")
        model.fit(points, np.log([targets[index] for index in inside]))
    return model, space


def environment_lines(settings: Settings) -> list[str]:
    """The lines that set ``settings`` in a shell."""
    return [
        f"export {ENV_PARTITION_SIZE}={settings.partition_size}",
        f"export {ENV_CREDIT_SIZE}={settings.credit_size}",
        f"export {ENV_MODE}={settings.mode}",
    ]


def describe(settings: Settings) -> str:
    """Mode and sizes in a few words."""
    sizes = f"{format_size(settings.partition_size)} / {format_size(settings.credit_size)}"
    return f"{settings.mode} {sizes}"


def _explained(trial: Trial) -> str:
    last = f"; its last output:\n{trial.output}" if trial.output else ""
    return f"{trial.failure}{last}"


def _targets(outcomes: Sequence[Outcome]) -> list[float]:
    slowest = max(outcome.seconds or 0.0 for outcome in outcomes)
    return [outcome.seconds or FAILED * slowest for outcome in outcomes]


def _point(settings: Settings) -> list[Any]:
    partition = float(np.log2(settings.partition_size))
    credit = float(np.log2(settings.credit_size / settings.partition_size))
    return [partition, min(credit, 4.0), settings.mode]


def _as_json(outcome: Outcome) -> dict[str, Any]:
    settings = outcome.settings
    return {
        "partition_size": settings.partition_size,
        "credit_size": settings.credit_size,
        "mode": settings.mode,
        "iteration_s": outcome.seconds,
        "failure": outcome.failure,
    }


def _from_json(entry: dict[str, Any]) -> Outcome:
    settings = Settings(
        partition_size=entry["partition_size"],
        credit_size=entry["credit_size"],
        mode=entry["mode"],
    )
    return Outcome(settings=settings, seconds=entry["iteration_s"], failure=entry["failure"])


def _check_writable(path: Path) -> None:
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"--output {path} cannot be written: {error}; name a file in a directory that can"
        ) from error

"""The ``DMLC_*`` variables that tell a process its role in a parameter-server job.

They are ps-lite's, and MXNet's trackers, Kubernetes operators and ``bytescheduler launch`` all set
them. ps-lite itself aborts the process, or waits for ever, when one is missing or wrong; here the
variable is named instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bytescheduler.exceptions import ConfigurationError

__all__ = ["NUM_SERVER", "NUM_WORKER", "PORT", "ROLE", "ROLES", "URI", "Job", "require_variables"]

ROLE: Final = "DMLC_ROLE"
URI: Final = "DMLC_PS_ROOT_URI"
PORT: Final = "DMLC_PS_ROOT_PORT"
NUM_SERVER: Final = "DMLC_NUM_SERVER"
NUM_WORKER: Final = "DMLC_NUM_WORKER"
ROLES: Final = ("scheduler", "server", "worker")

_REMEDY: Final = "start the job with 'bytescheduler launch', or set it as your tracker does"
_LAST_PORT: Final = 65535
_LAST_COUNT: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process's view of a parameter-server job.

    Attributes:
        role: ``scheduler``, ``server`` or ``worker``.
        host, port: where the scheduler listens.
        servers, workers: how many of each there are.
    """

    role: str
    host: str
    port: int
    servers: int
    workers: int


def require_variables(environ: Mapping[str, str], role: str | None = None) -> Job:
    """Read and check the variables.

    Args:
        environ: usually ``os.environ``.
        role: what ``DMLC_ROLE`` must be; any of the three by default.

    Raises:
        ConfigurationError: one is missing or wrong; the message names it, with its value.
    """
    allowed = ROLES if role is None else (role,)
    found = _text(environ, ROLE, f"one of {', '.join(allowed)}")
    if found not in allowed:
        raise ConfigurationError(
            f"{ROLE} must be {' or '.join(allowed)} here, got {found!r}; {_REMEDY}"
        )
    return Job(
        role=found,
        host=_text(environ, URI, "the scheduler's address"),
        port=_number(environ, PORT, "the scheduler's port", _LAST_PORT),
        servers=_number(environ, NUM_SERVER, "the number of servers", _LAST_COUNT),
        workers=_number(environ, NUM_WORKER, "the number of workers", _LAST_COUNT),
    )


def _text(environ: Mapping[str, str], name: str, meaning: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise ConfigurationError(f"{name} must be set to {meaning}, but it is not; {_REMEDY}")
    return value


def _number(environ: Mapping[str, str], name: str, meaning: str, last: int) -> int:
    text = _text(environ, name, meaning)
    if not text.isdecimal() or not 1 <= int(text) <= last:
        raise ConfigurationError(
            f"{name} must be {meaning}, a number from 1 to {last}, got {text!r}; {_REMEDY}"
        )
    return int(text)

"""``bytescheduler doctor``: what is installed, what works, how fast, and what to expect of it."""

from bytescheduler.doctor.command import add_arguments, run

__all__ = ["add_arguments", "run"]

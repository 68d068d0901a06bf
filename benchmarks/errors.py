"""What a benchmark says when it cannot go on."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A benchmark cannot start or go on; the message is for people and ends the command."""

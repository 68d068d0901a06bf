"""CSV files with errors that name file, line, column and what was expected.

The standard ``csv`` reader splits; this adds the checks. pandas would say neither the line nor the
column of a malformed number, and the files are small.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bytescheduler.exceptions import ConfigurationError

__all__ = ["Row", "read_header", "read_table"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table; the accessors check and convert."""

    path: Path
    line: int
    values: dict[str, str]

    def error(self, column: str, expected: str) -> ConfigurationError:
        """Return the error for a value in ``column`` that is not what was expected."""
        return ConfigurationError(
            f"{self.path}, line {self.line}, column {column}: expected {expected}, "
            f"got {self.values.get(column, '')!r}"
        )

    def has(self, column: str) -> bool:
        """Say whether the column exists and is not empty here."""
        return bool(self.values.get(column))

    def text(self, column: str) -> str:
        """Return a non-empty text."""
        if not self.has(column):
            raise self.error(column, "a text that is not empty")
        return self.values[column]

    def choice(self, column: str, known: Sequence[str]) -> str:
        """Return one of the known words."""
        if self.values.get(column) not in known:
            raise self.error(column, "one of " + ", ".join(known))
        return self.values[column]

    def number(self, column: str, *, least: float = -math.inf, default: str = "") -> float:
        """Return a finite number of at least ``least``."""
        expected = "a number" + ("" if least == -math.inf else f" of at least {least:g}")
        try:
            value = float(self.values.get(column) or default)
        except ValueError:
            raise self.error(column, expected) from None
        if not math.isfinite(value) or value < least:
            raise self.error(column, expected)
        return value

    def integer(self, column: str, *, least: int, default: str = "") -> int:
        """Return a whole number of at least ``least``."""
        try:
            value = int(self.values.get(column) or default)
        except ValueError:
            raise self.error(column, f"a whole number of at least {least}") from None
        if value < least:
            raise self.error(column, f"a whole number of at least {least}")
        return value

    def numbers(self, column: str, count: int) -> tuple[float, ...]:
        """Return ``count`` numbers, none negative, separated by spaces."""
        expected = f"{count} numbers of at least 0, separated by spaces"
        try:
            values = tuple(float(word) for word in self.values.get(column, "").split())
        except ValueError:
            raise self.error(column, expected) from None
        if len(values) != count or not all(0 <= value < math.inf for value in values):
            raise self.error(column, expected)
        return values


def read_header(path: Path) -> list[str]:
    """Return the column names of a CSV file.

    Raises:
        ConfigurationError: it cannot be read or is empty.
    """
    return _read_lines(path)[0]


def read_table(path: Path, columns: Sequence[str]) -> list[Row]:
    """Return the rows of a CSV file with a header.

    Args:
        path: the file.
        columns: columns that must be there; others are kept as they are.

    Raises:
        ConfigurationError: it cannot be read, lacks a column, has a line of another length, or has
            no row.
    """
    header, *lines = _read_lines(path)
    missing = [column for column in columns if column not in header]
    if missing:
        raise ConfigurationError(
            f"{path}, line 1: expected the columns {', '.join(columns)}; "
            f"missing: {', '.join(missing)}"
        )
    rows: list[Row] = []
    for number, words in enumerate(lines, start=2):
        if not words:
            continue
        if len(words) != len(header):
            raise _wrong_length(path, number, header, words)
        rows.append(Row(path, number, dict(zip(header, words, strict=True))))
    if not rows:
        raise ConfigurationError(f"{path}: expected at least one row after the header, got none")
    return rows


def _wrong_length(
    path: Path, number: int, header: Sequence[str], words: Sequence[str]
) -> ConfigurationError:
    column = header[len(words)] if len(words) < len(header) else f"{len(header) + 1}"
    return ConfigurationError(
        f"{path}, line {number}, column {column}: expected {len(header)} values "
        f"({', '.join(header)}), got {len(words)}"
    )


def _read_lines(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [[word.strip() for word in line] for line in csv.reader(file)]
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: is not a CSV file in UTF-8 ({error})") from error
    if not lines or not lines[0]:
        raise ConfigurationError(
            f"{path}, line 1: expected a header with column names, got nothing"
        )
    return lines

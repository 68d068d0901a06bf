"""The launchers of the transports' contract suite start these tests' ranks too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "transports"))

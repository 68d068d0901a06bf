"""The Python code in README and docs runs, page by page, each page as one script of one rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bytescheduler._ports import free_port

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "docs/quick-start.md", "docs/semantics.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)\)")


@pytest.mark.multiprocess
@pytest.mark.parametrize("page", PAGES)
def test_the_code_on_a_page_runs(page, tmp_path):
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **environment, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    broken = [
        (page.name, target)
        for page in pages
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken

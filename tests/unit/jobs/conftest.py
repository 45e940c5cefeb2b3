"""A folder with a user's job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.jobs.own_job import OWN, SMALL


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module and a job beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    (tmp_path / "own_parts.py").write_text(OWN)
    (tmp_path / "job.toml").write_text(SMALL)
    return tmp_path / "job.toml"

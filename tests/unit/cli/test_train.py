"""What `syncline train` prints while a run goes on."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from syncline.cli.train import _plain
from tests.unit.report.lines_of_a_run import end, epoch, event, start
from tests.unit.report.test_run_record import fed


@pytest.mark.parametrize("over", [False, True])
def test_a_resumed_run_prints_what_is_new_however_soon_it_is_over(over: bool) -> None:
    """The display may begin when the run has ended already."""
    before = [start(), epoch(0, accuracy=0.5), event("lost", what="its process is gone"), end("stopped")]
    lines = [start(resumed={"version": 10, "epoch": 1}), event("lost", what="another is gone")]
    lines += [epoch(1, accuracy=0.7), end("finished")]
    record = fed([*before, *lines] if over else [*before, lines[0]])

    def wait(timeout: float) -> None:
        for line in [] if over else lines[1:]:
            record.feed(line)

    said = io.StringIO()
    _plain(cast(Any, SimpleNamespace(wait=wait)), record, Console(file=said, width=120))
    words = said.getvalue()
    assert "epoch 2/4" in words and "another is gone" in words
    assert "epoch 1/4" not in words and "its process is gone" not in words

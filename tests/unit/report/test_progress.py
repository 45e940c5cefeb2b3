"""The display of a run while a caller waits: plain lines, a terminal's panel, a notebook's, and displays that fail."""

from __future__ import annotations

import builtins
import io
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from syncline.errors import UsageError
from syncline.report.progress import ProgressDisplay, progress_is_wanted
from tests.unit.report.lines_of_a_run import end, epoch, event, start
from tests.unit.report.test_run_record import fed


def lines_of(text: io.StringIO) -> list[str]:
    return text.getvalue().splitlines()


@pytest.mark.parametrize("over", [False, True])
def test_a_resumed_run_prints_what_is_new_however_soon_it_is_over(over: bool) -> None:
    before = [start(), epoch(0, accuracy=0.5), event("lost", what="its process is gone"), end("stopped")]
    lines = [start(resumed={"version": 10, "epoch": 1}), event("lost", what="another is gone")]
    lines += [epoch(1, accuracy=0.7), end("finished")]
    record = fed([*before, *lines] if over else [*before, lines[0]])
    text = io.StringIO()
    with ProgressDisplay(record, "runs/a", console=Console(file=text, width=120)).shown():
        for line in [] if over else lines[1:]:
            record.feed(line)
    words = text.getvalue()
    assert words.startswith("runs/a: ") and "epoch 2/4" in words and "another is gone" in words
    assert "epoch 1/4" not in words and "its process is gone" not in words
    assert lines_of(text)[-1].startswith("finished: 2 epochs")


def test_every_line_is_printed_once_over_several_waits_and_none_after_the_end() -> None:
    record, text = fed([start()]), io.StringIO()
    progress = ProgressDisplay(record, "a", console=Console(file=text, width=120))
    for number in range(3):
        with progress.shown(live=False):
            record.feed(epoch(number, accuracy=0.5))
    with progress.shown(live=False):
        record.feed(end("finished"))
    known = text.getvalue()
    with progress.shown():
        record.feed(epoch(3, accuracy=0.5))
    assert text.getvalue() == known
    assert [line.split()[0] for line in lines_of(text)] == ["a:", "epoch", "epoch", "epoch", "finished:"]


def test_of_two_waits_at_once_one_shows() -> None:
    record, text = fed([start()]), io.StringIO()
    progress = ProgressDisplay(record, "a", console=Console(file=text, width=120))
    with progress.shown(), progress.shown():
        record.feed(epoch(0, accuracy=0.5))
    assert len(lines_of(text)) == 2


def test_a_terminal_has_a_panel_and_a_second_run_plain_lines() -> None:
    first, second = io.StringIO(), io.StringIO()
    record, other = fed([start()]), fed([start()])

    def terminal(text: io.StringIO) -> Console:
        return Console(file=text, width=120, force_terminal=True, _environ={"TERM": "xterm"})

    drawn = threading.Event()
    one = ProgressDisplay(record, "a", console=terminal(first), note=lambda: drawn.set() or "stopping")  # type: ignore[func-returns-value]
    two = ProgressDisplay(other, "b", console=terminal(second))
    with one.shown():
        assert drawn.wait(60)
        with two.shown():
            other.feed(epoch(0, accuracy=0.5))
        record.feed(epoch(0, accuracy=0.5))
        record.feed(end("finished"))
    assert "╭" in first.getvalue() and "stopping" in first.getvalue() and "finished" in first.getvalue()
    assert "╭" not in second.getvalue() and "epoch 1/4" in second.getvalue()


def test_a_notebook_has_one_panel_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    class Handle:
        def update(self, html: str) -> None:
            pages.append(html)

    def display(html: str, display_id: bool) -> Handle:
        assert display_id and not pages
        pages.append(html)
        return Handle()

    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    record = fed([start()])
    progress = ProgressDisplay(record, "a")
    for line in (epoch(0, accuracy=0.5), end("finished")):
        with progress.shown(live=False):
            record.feed(line)
    assert len(pages) >= 2 and pages[-1].startswith("<pre") and "finished" in pages[-1]


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("no space left")


def test_a_display_that_fails_is_given_up_silently() -> None:
    record = fed([start()])
    progress = ProgressDisplay(record, "a", console=Console(file=Broken()))
    for _ in range(2):
        with progress.shown():
            record.feed(epoch(0, accuracy=0.5))


@pytest.mark.parametrize(
    "progress, switch, wanted",
    [(True, "", True), (False, "", False), (True, "off", False), (True, "0", False), (True, "on", True)],
)
def test_the_argument_and_the_environment_switch_it(
    monkeypatch: pytest.MonkeyPatch, progress: bool, switch: str, wanted: bool
) -> None:
    monkeypatch.setenv("SYNCLINE_PROGRESS", switch)
    assert progress_is_wanted(progress) is wanted


def test_progress_is_true_or_false() -> None:
    answer: Any = "bar"
    with pytest.raises(UsageError, match="progress is True or False, got 'bar'"):
        progress_is_wanted(answer)

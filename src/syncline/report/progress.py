"""Show a run while a caller waits for it: a live panel on a terminal or in a notebook, otherwise plain lines.

A display reads a `RunRecord` on its own thread, so that a slow, blocked or broken terminal neither delays nor ends the run. It
prints nothing after the wait has ended. Not responsible for the command line's summary (cli/train.py).
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel

from syncline.errors import UsageError
from syncline.report.run_panel import panel
from syncline.report.run_record import RunRecord
from syncline.report.run_text import epoch_line, event_line, headline, how, print_line
from syncline.terminal import Terminal

SWITCH = "SYNCLINE_PROGRESS"  # environment variable
LOOK, REFRESH = 0.1, 0.25  # seconds between two looks at the record: plain lines, panels
LONGEST = 2.0  # seconds that a wait's end waits for its display
WIDTH = 110  # characters of a notebook's panel
QUIET = ("left", "warning")  # events without a line: the loss before and Python's warning show the same
LOGGER = logging.getLogger("syncline")
NOTEBOOK = '<pre style="white-space:pre;line-height:normal;font-family:monospace">{code}</pre>'

_live_display = threading.Lock()  # held by the one run of this process that has the terminal's panel


def progress_is_wanted(progress: Any) -> bool:
    """Return whether a run shows its progress, given the argument `progress` and the environment."""
    if not isinstance(progress, bool):
        raise UsageError(f"progress is True or False, got {progress!r}")
    return progress and os.environ.get(SWITCH, "").lower() not in ("0", "off", "false", "no")


class ProgressDisplay:
    """The display of one run, for any number of waits, one after the other or at the same time.

    `console` is stderr if not given. `title` begins the first plain line. `note` is shown below a panel. With `closing` the last
    plain line says how the run ended.
    """

    def __init__(
        self,
        record: RunRecord,
        title: str,
        *,
        console: Console | None = None,
        note: Callable[[], str] = str,
        closing: bool = True,
    ) -> None:
        self._record, self._title, self._note, self._closing = record, title, note, closing
        self._given = console
        self._waiting = threading.Lock()  # held by the wait that shows
        self._over = False  # nothing more is shown: the end was, or the display failed
        self._epochs: set[int] | None = None  # that have a line; None: there is no line yet
        self._events = 0
        self._frame = Panel("")
        self._notebook: Any = None  # a handle of IPython's

    @contextmanager
    def shown(self, *, live: bool = True) -> Iterator[None]:
        """Show progress inside the block; a terminal gets plain lines where not `live`, as for a wait with a timeout."""
        if self._over or not self._waiting.acquire(blocking=False):
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(
            target=self._show, args=(ended, live), name="syncline-progress", daemon=True
        )
        try:
            thread.start()
            yield
        finally:
            ended.set()
            thread.join(LONGEST)
            self._over = self._over or thread.is_alive() or self._record.end is not None
            self._waiting.release()

    def _show(self, ended: threading.Event, live: bool) -> None:
        try:
            console = self._given or Terminal(stderr=True)
            if console.is_jupyter:
                self._in_notebook(ended)
            elif (
                live and console.is_terminal and not console.is_dumb_terminal and _live_display.acquire(False)
            ):
                try:
                    self._on_terminal(ended, console)
                finally:
                    _live_display.release()
            else:
                self._in_lines(ended, console)
        except Exception:
            self._over = True
            LOGGER.debug("the progress display failed; the run continues", exc_info=True)

    def _panel(self) -> Panel:
        """Return the current panel, or the previous one if the record changed while it was drawn."""
        try:
            self._frame = panel(self._record, note=self._note())
        except (RuntimeError, LookupError):
            LOGGER.debug("a frame of the progress display was left out", exc_info=True)
        return self._frame

    def _on_terminal(self, ended: threading.Event, console: Console) -> None:
        """Keep a panel at the bottom; what the caller's process prints to this terminal appears above it."""
        out, err = sys.stdout.isatty(), sys.stderr.isatty()
        with Live(
            console=console,
            auto_refresh=False,
            get_renderable=self._panel,
            redirect_stdout=out,
            redirect_stderr=err,
        ) as board:
            while not ended.wait(REFRESH):
                board.refresh()
            board.transient = self._record.end is None  # the wait was given up, and the run continues
            board.refresh()

    def _in_notebook(self, ended: threading.Event) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found]  # there is no notebook without it

        while True:
            over = ended.wait(REFRESH) if self._notebook is not None else ended.is_set()
            page = Terminal(record=True, width=WIDTH, file=io.StringIO(), force_jupyter=False)
            page.print(self._panel())
            html = HTML(page.export_html(inline_styles=True, code_format=NOTEBOOK))
            if self._notebook is None:
                self._notebook = display(html, display_id=True)
            else:
                self._notebook.update(html)
            if over:
                return

    def _in_lines(self, ended: threading.Event, console: Console) -> None:
        """Print a line per epoch and event. Of a resumed run only what is new, however soon the run has ended."""
        record = self._record
        if self._epochs is None:
            self._epochs, self._events = set(record.earlier[0]), record.earlier[1]
            print_line(console, f"{self._title}: {headline(record)}")
        over = False
        while not over:
            over = ended.wait(LOOK)
            for each in list(record.epochs):
                if each["epoch"] not in self._epochs:
                    self._epochs.add(each["epoch"])
                    print_line(console, epoch_line(record, each))
            fresh = record.events[self._events :]  # the recording thread may add more
            self._events += len(fresh)
            for each in fresh:
                if each.get("event") not in QUIET:
                    print_line(console, event_line(each))
        if self._closing and record.end is not None:
            print_line(console, how(record))

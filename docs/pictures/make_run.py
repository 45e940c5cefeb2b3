"""Draws run.svg, the terminal display in the middle of a real run, and keeps that run's report for a screenshot.

usage: python docs/pictures/make_run.py FOLDER        (the run folder to make)
One of four learners is killed on the way, so that the picture shows what that looks like.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from syncline.jobs import Job
from syncline.report.run_panel import panel
from syncline.train import train

KILL, DRAW = 0.3, 0.6  # parts of the run


def main(folder: str) -> None:
    job = Job.builtin([f"run_dir={folder}", "epochs=60", "sync=softsync:2"])
    run = train(**job.build(), wait=False)
    record = run.recording.record
    while (record.progress or 0.0) < KILL:
        time.sleep(0.02)
    os.kill(record.samples[-1]["learners"][2]["pid"], signal.SIGKILL)
    while (record.progress or 0.0) < DRAW:
        time.sleep(0.02)
    console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True)
    console.print(panel(record))
    text = console.export_svg(title="syncline train --sync softsync:2")
    text = re.sub(
        r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL
    )  # fonts from elsewhere: any monospace does
    Path(__file__).with_name("run.svg").write_text(text, encoding="utf-8")
    run.wait()


if __name__ == "__main__":
    main(sys.argv[1])

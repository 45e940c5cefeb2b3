"""The command line: `syncline train`, `presets`, `show`, `compare`, `simulate`, `tradeoff`.

    app.py        the commands, their options and help; simulate.py, tradeoff.py: those of one command each
    training.py   a job from its file to its end; simulating_job.py: on a simulated cluster (engines.py)
    studying.py   a study of many runs; study_display.py: how it is shown
    display.py    a run as a panel: live, or once for `show`
    words.py      a run in lines: what plain output and summaries say
    comparing.py  several runs side by side
    messages.py   errors and warnings on stderr, exit codes; letters.py: where a terminal has not all letters

Displays render a `RunRecord`; nothing here decides anything about training.
"""

from __future__ import annotations

from syncline.cli.app import main

__all__ = ["main"]

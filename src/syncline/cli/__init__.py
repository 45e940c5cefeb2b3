"""The command line: `syncline train`, `presets`, `show`, `compare`, `simulate`, `tradeoff`.

    app.py           the commands, their options and help; simulate.py, tradeoff.py, plan.py: those of one command each
    options.py       options of several commands, and the job that a command line asks for
    train.py         a job to its end; fault_hunt.py: a hunt
    study_display.py how a study of many runs is shown
    display.py       a run as a panel, live or once for `show`; several side by side
    plain_output.py  a run in lines: what plain output and summaries say
    error_output.py  errors and warnings on stderr, exit codes; letters where a terminal has not all

Displays render a `RunRecord`; nothing here decides anything about training.
"""

from __future__ import annotations

from syncline.cli.app import main

__all__ = ["main"]

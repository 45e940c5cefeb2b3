"""The command line: `syncline train`, `presets`, `show`, `compare`, `simulate`, `tradeoff`.

    app.py           the commands and their help; arguments.py: types of their options; both without torch
    options.py       the job that a command line asks for
    train.py         a job to its end; simulate.py, fault_hunt.py, tradeoff.py, plan.py: the work of one command each
    study_display.py how a study of many runs is shown
    error_output.py  errors and warnings on stderr, exit codes; letters where a terminal has not all

Displays render a `RunRecord`; nothing here decides anything about training.
"""

from __future__ import annotations

from syncline.cli.app import main

__all__ = ["main"]

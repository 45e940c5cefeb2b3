"""The command line: `syncline train`, `presets`, `show`, `compare`, `simulate`, `tradeoff`.

    app.py           the commands, their options and help; simulate.py, tradeoff.py, plan.py: those of one command each
    train.py         a job from its file to its end; simulate_job.py: on a simulated cluster (engines.py); hunt.py
    study.py         a study of many runs; study_display.py: how it is shown
    display.py       a run as a panel: live, or once for `show`
    plain_output.py  a run in lines: what plain output and summaries say
    compare.py       several runs side by side
    error_output.py  errors and warnings on stderr, exit codes; ascii_output.py: where a terminal has not all letters

Displays render a `RunRecord`; nothing here decides anything about training.
"""

from __future__ import annotations

from syncline.cli.app import main

__all__ = ["main"]

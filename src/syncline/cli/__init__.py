"""The command line: `syncline train`, `presets`, `show`, `compare`.

    app.py        the commands, their options and help
    training.py   a job from its file to its end
    display.py    a run as a panel: live, or once for `show`
    words.py      a run in lines: what plain output and summaries say
    comparing.py  several runs side by side
    messages.py   errors and warnings on stderr, exit codes

Displays render a `RunRecord`; nothing here decides anything about training.
"""

from __future__ import annotations

from syncline.cli.app import main

__all__ = ["main"]

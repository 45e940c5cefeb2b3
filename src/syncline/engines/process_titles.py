"""Titles of a run's processes, as `ps`, `top` and `nvidia-smi` show them: "syncline: learner 2 of first".

Called in the process that gets the title. Processes that only run the caller's script keep their own title.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setproctitle import getproctitle, setproctitle

PREFIX = "syncline: "


def name_of_run(folder: Path | None) -> str:
    """Return the name of a run's folder; without a folder, the caller's script and process id."""
    if folder is not None:
        return folder.resolve().name
    script = Path(sys.argv[0]).name if getattr(sys, "argv", None) else ""
    known = {"": "python", "-c": "python", "ipykernel_launcher.py": "notebook"}
    return f"{known.get(script, script)}[{os.getpid()}]"


def title_of(part: str, run: str) -> str:
    """Return the title of a part of a run, such as "learner 2"."""
    return f"{part} of {run}" if run else part


def set_title(title: str) -> None:
    """Show `title` from now on. A folder's name may hold anything, so what cannot be printed becomes "?"."""
    setproctitle(PREFIX + "".join(letter if letter.isprintable() else "?" for letter in title))


def own_title() -> str:
    """Return the title that this process was given."""
    return getproctitle().removeprefix(PREFIX)


@contextmanager
def titled(title: str) -> Iterator[None]:
    """Show `title` inside the block: for a process of the caller's that is a learner for a while."""
    before = getproctitle()
    set_title(title)
    try:
        yield
    finally:
        setproctitle(before)

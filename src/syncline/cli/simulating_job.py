"""`syncline simulate JOB`: one job on a simulated cluster, with the display and the run folder of any other run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from syncline.cli.engines import Simulated
from syncline.cli.training import Wish, load, run_loaded
from syncline.cli.words import duration


def simulate_job(
    job: Path | None,
    simulated: Simulated,
    console: Console,
    *,
    flags: Mapping[str, Any],
    sets: list[str],
    run_dir: str | None,
) -> int:
    """Run it to its end; the exit code comes back."""
    wish = Wish(job=job, flags=flags, sets=sets, run_dir=run_dir, command="simulate")
    loaded = simulated.apply(load(wish))
    began = time.monotonic()
    code = run_loaded(loaded, wish, console)
    cluster = loaded.engine.arguments.get("cluster", "equal")
    words = f"times are virtual, on {cluster}; the simulation took {duration(time.monotonic() - began)}"
    console.print(words, soft_wrap=True, markup=False, highlight=False)
    return code

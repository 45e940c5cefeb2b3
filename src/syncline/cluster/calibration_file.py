"""This machine's measured costs in a file of the user's cache. Not responsible for measuring (tools/calibration)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from syncline.cluster.record import Cluster
from syncline.errors import UsageError


def kept_file() -> Path:
    """`$XDG_CACHE_HOME/syncline/this-machine.json`, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncline" / "this-machine.json"


def keep(cluster: Cluster) -> Path:
    path = kept_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cluster.record(), indent=1) + "\n", encoding="utf-8")
    return path


def read_kept() -> Cluster:
    path = kept_file()
    if not path.exists():
        raise UsageError(
            f"'this-machine' is not calibrated yet ({path} is not there): run python -m tools.calibration.calibrate "
            "in a checkout of syncline's sources (the wheel has no calibration), or build a Cluster of your own"
        )
    try:
        return Cluster.from_record(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, UsageError) as error:
        raise UsageError(f"{path} holds no cluster ({error}); calibrate again") from error

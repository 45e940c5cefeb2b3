"""What was measured of this machine, or of the cluster at hand, in files of the user's cache. Not responsible for measuring."""

from __future__ import annotations

import json
import os
from pathlib import Path

from syncline.cluster.record import Cluster
from syncline.errors import UsageError

HOW = {
    "this-machine": "run python -m tools.calibration.calibrate, or pass the Cluster that calibrate() gives",
    "this-cluster": "call sl.Ray(...).measure(keep=True), or pass the Cluster that it gives",
}


def kept_file(name: str = "this-machine") -> Path:
    """`$XDG_CACHE_HOME/syncline/this-machine.json`, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncline" / f"{name}.json"


def keep(cluster: Cluster) -> Path:
    path = kept_file(cluster.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cluster.record(), indent=1) + "\n", encoding="utf-8")
    return path


def read_kept(name: str) -> Cluster:
    path = kept_file(name)
    if not path.exists():
        raise UsageError(f"{name!r} is not measured yet ({path} is not there): {HOW[name]}")
    try:
        return Cluster.from_record(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, UsageError) as error:
        raise UsageError(f"{path} holds no cluster ({error}); measure again: {HOW[name]}") from error

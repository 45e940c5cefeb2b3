"""Clusters with a name: those of the papers, and this machine or the cluster at hand as they were measured (files of the user's cache).

The figures are the papers' own where they give any; docs/howto/simulator.md says for each where it is from. The computation
is that of one model; for another give `compute=`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from syncline.cluster.record import Cluster, Compute, Cost, Jitter, Link
from syncline.dial import nearest
from syncline.errors import UsageError

HOW = {
    "this-machine": "run python -m tools.calibration.calibrate, or pass the Cluster that calibrate() gives",
    "this-cluster": "call sl.Ray(...).measure(keep=True), or pass the Cluster that it gives",
}


FIGURES = (
    Cluster.equal(),
    # Rudra's: cifar10_full on nodes of 32 cores, about four learners each, one parameter server. base and per_example from the
    # baseline's 22,392 s for 140 epochs and Table 2's other times; the server's costs from its 30-softsync row at μ = 4, where it
    # has no time left.
    Cluster(
        name="p775",
        compute=Compute(base=0.008, per_example=0.00313),
        jitter=Jitter(kind="lognormal", spread=0.1),
        crowding=0.12,
        learners_per_machine=4,
        card=Link(latency=5e-6, bandwidth=24e9),
        memory=Link(latency=2e-6, bandwidth=100e9),
        take=Cost(fixed=1e-4, per_byte=3e-10),
        fold=Cost(fixed=5e-4, per_byte=8e-10),
        serve=Cost(fixed=1e-4, per_byte=3e-10),
        message=1e-5,
    ),
    # SINGA's: 72 nodes of four cores on 1 Gbit/s; an AlexNet-like net, 27.3 s for 256 images on one node.
    Cluster(
        name="ethernet-1g",
        compute=Compute(base=0.05, per_example=27.25 / 256),
        jitter=Jitter(kind="normal", spread=0.05),
        card=Link(latency=1e-4, bandwidth=125e6),
        memory=Link(latency=5e-6, bandwidth=10e9),
        take=Cost(fixed=2e-5, per_byte=3e-10),
        fold=Cost(fixed=2e-5, per_byte=1e-9),
        serve=Cost(fixed=2e-5, per_byte=2e-10),
        message=2e-5,
    ),
    # Eight P100 with four NVLinks each, every GPU as a machine of its own; AlexNet, about 1,300 images/s each.
    Cluster(
        name="dgx-1",
        compute=Compute(base=0.004, per_example=1 / 1300),
        jitter=Jitter(kind="normal", spread=0.01),
        beside=True,
        card=Link(latency=1e-5, bandwidth=80e9),
        memory=Link(latency=5e-6, bandwidth=500e9),
        take=Cost(fixed=1e-5, per_byte=6e-12),
        fold=Cost(fixed=2e-5, per_byte=1.2e-11),
        serve=Cost(fixed=1e-5),
        message=5e-6,
    ),
)
NAMED = {**{cluster.name: cluster for cluster in FIGURES}, **dict.fromkeys(HOW)}


def kept_file(name: str = "this-machine") -> Path:
    """`$XDG_CACHE_HOME/syncline/this-machine.json`, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncline" / f"{name}.json"


def keep(cluster: Cluster) -> Path:
    path = kept_file(cluster.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cluster.record(), indent=1) + "\n", encoding="utf-8")
    return path


def cluster_named(name: str) -> Cluster:
    if not isinstance(name, str) or name not in NAMED:
        raise UsageError(
            f"unknown cluster {name!r}{nearest(name, NAMED)}; use one of {', '.join(NAMED)}, or build a Cluster of your own"
        )
    if (known := NAMED[name]) is not None:
        return known
    path = kept_file(name)
    if not path.exists():
        raise UsageError(f"{name!r} is not measured yet ({path} is not there): {HOW[name]}")
    try:
        return Cluster.from_record(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, UsageError) as error:
        raise UsageError(f"{path} holds no cluster ({error}); measure again: {HOW[name]}") from error

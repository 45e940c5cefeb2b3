"""The driver of `bench_cluster`, on the first node: takes orders as lines of JSON, runs each on the Ray cluster, answers with a line.

    {"contender": "softsync:1", "dims": [784, 512, 10], "batch_size": 64, "seconds": 3, "workers": 2}

`workers` are those of each node, `servers` nodes for shards alone. With "predict": true nothing is run on the other node but its link measured: the answer's rate is what
the simulator says. Ray's words and the learners' go to standard error.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import traceback
from dataclasses import asdict
from typing import Any

import ray
import torch

import syncline as sl
from benchmarks import cluster_learner
from benchmarks.cluster_learner import Pace
from benchmarks.peers import ray_server
from benchmarks.workload import make_optimizer
from tools.calibration.calibrate import calibrate, perceptron, table_shards

LOCKSTEP = ("hardsync", "delayed")


def run(
    contender: str,
    dims: list[int],
    batch_size: int,
    seconds: float,
    workers: int,
    servers: int = 0,
    predict: bool = False,
) -> dict[str, float]:
    if predict:
        return asdict(predicted(tuple(dims), batch_size, workers, sync=contender))
    if contender in ray_server.WAYS:
        return asdict(
            ray_server.run(tuple(dims), batch_size, workers, seconds, way=contender, apart=servers > 0)
        )
    sync, _, topology = contender.partition("@")
    result = sl.launch(
        cluster_learner.ours,
        tuple(dims),
        batch_size,
        seconds,
        not sync.startswith(LOCKSTEP),
        learners=2 * workers,
        sync=sync,
        topology=topology.replace("+", ",") or "servers",
        threads=1,
        engine=sl.Ray(nodes=2 + servers, learners_per_node=workers, server_nodes=servers or None),
    )
    return asdict(together(result.returned))


def predicted(dims: tuple[int, ...], batch_size: int, workers: int, *, sync: str) -> Pace:
    """One learner here and the link, measured; all others simulated."""
    work = dataclasses.replace(perceptron(dims, batch_size), optimizer=make_optimizer)
    costs = calibrate(work, learners=workers, sync=sync)
    cluster = sl.Ray(nodes=2, learners_per_node=workers).measure(costs, learners=2 * workers)
    numbers = sum(value.numel() for value in work.model().parameters())
    timing = sl.Sim(cluster).timing(
        parameters=numbers,
        examples=100 * batch_size,
        learners=2 * workers,
        batch_size=batch_size,
        sync=sync,
        shards=table_shards(work, 2 * workers, sync),
        epochs=1,
    )
    return Pace(timing.gradients / timing.seconds, 0.0, 0.0)


def together(paces: list[Pace]) -> Pace:
    """All gradients; the link as the first worker's node saw it; the usual worker's share of computing."""
    computing = statistics.mean(each.computing for each in paces)
    return Pace(sum(each.rate for each in paces), paces[0].sent, paces[0].received, computing)


def answer(line: str) -> dict[str, Any]:
    try:
        return {"answer": run(**json.loads(line))}
    except Exception:
        return {"failed": traceback.format_exc()}


def main() -> None:
    with os.fdopen(os.dup(1), "w") as said:
        os.dup2(2, 1)
        torch.set_num_threads(1)
        ray.init(address="auto", logging_level="ERROR")
        for line in sys.stdin:
            said.write(json.dumps(answer(line)) + "\n")
            said.flush()
        with contextlib.suppress(Exception):
            ray.shutdown()


if __name__ == "__main__":
    main()

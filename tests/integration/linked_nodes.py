"""Runs over two network namespaces, as a script in the first: agents without Ray, as in `syncline.testing.Nodes`, in a process in the second.

    python linked_nodes.py NAMESPACE "train hardsync" "measure" …

Prints what came of each as a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl
from benchmarks import link
from syncline.engines.authentication import Secret
from syncline.engines.ray.agent import Agent
from syncline.engines.ray.cluster import RayCluster
from syncline.engines.ray.link_measurement import Address, Echo
from syncline.engines.ray.placement import Node
from tests.integration.small_runs import same

EXAMPLES, EPOCHS, BATCH = 96, 2, 8
NUMBERS = 200 * 250 + 250  # of the model
LONGEST = 90.0  # seconds


class Elsewhere:
    """A process in the other namespace: has an agent, or what answers when the way is measured, one at a time."""

    def __init__(self, namespace: str) -> None:
        context = multiprocessing.get_context("fork")  # with torch imported, and before there are threads
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, namespace), daemon=True)
        self._process.start()

    def begin(self, kind: type[Agent] | type[Echo], secret: Secret, **options: Any) -> Any:
        self._ours.send((kind, secret, options))
        return self._ours.recv()

    def end(self) -> None:
        self._ours.send(None)


def serve(orders: Connection, namespace: str) -> None:
    link.enter(namespace)
    while True:
        kind, secret, options = orders.recv()
        with contextlib.closing(kind(host=link.ADDRESSES[1], secret=secret, **options)) as served:
            orders.send(served.about() if isinstance(served, Agent) else served.address())
            orders.recv()


class LinkedCluster(RayCluster):
    """Two nodes of two cores; the first is the caller's, the second is behind the link."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        self._elsewhere, self.closing = elsewhere, threading.Event()

    def nodes(self) -> list[Node]:
        return [
            Node(f"node {index}", host, 2, home=index == 0) for index, host in enumerate(link.ADDRESSES[:2])
        ]

    def begin(self, nodes: Sequence[Node], loads: Sequence[int], secret: Secret, **options: Any) -> None:
        self.secret = secret
        self.about = {1: self._elsewhere.begin(Agent, secret, path=list(sys.path), folder=os.getcwd())}

    @contextlib.contextmanager
    def echoes(self, nodes: Sequence[Node], secret: Secret) -> Iterator[list[Address]]:
        yield [self._elsewhere.begin(Echo, secret)]

    def close(self) -> None:
        self.closing.set()
        self._elsewhere.end()


class Linked(sl.Ray):
    """In place of `sl.Ray`."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def _attach(self, cores: int) -> LinkedCluster:
        return LinkedCluster(self._elsewhere)


# -- what the caller does ------------------------------------------------------------------------------------


def begin(**options: Any) -> sl.Run:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, 200, generator=generator)
    labels = torch.randint(250, (EXAMPLES,), generator=generator)
    settings = {"learners": 4, "batch_size": BATCH, "epochs": EPOCHS, "seed": 1, "threads": 1}
    return sl.train(
        partial(nn.Linear, 200, 250),
        TensorDataset(inputs, labels),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        wait=False,
        **{**settings, **options},
    )


def train(engine: Linked, sync: str) -> dict[str, Any]:
    before = sum(link.traffic())
    there = begin(sync=sync, engine=engine).wait(LONGEST)
    moved = sum(link.traffic()) - before
    here = begin(sync=sync).wait(LONGEST)
    return {**told(there), "same": same(there.state_dict(), here.state_dict()), "moved": moved}


def cut(engine: Linked, namespace: str) -> dict[str, Any]:
    """The link goes down for good while all four train."""
    run = begin(sync="async", epochs=20, engine=engine)
    while (table := run.statistics().tables.get(0)) is None or table.version < 12:
        time.sleep(0.01)
    link.command("ip", "-n", namespace, "link", "set", link.INTERFACE, "down")
    return told(run.wait(LONGEST))


def measure(engine: Linked) -> dict[str, Any]:
    return engine.measure(learners=4).record()


def told(result: sl.Result) -> dict[str, Any]:
    return {
        "examples": result.statistics.tables[0].examples,
        "gradients": result.gradients,
        "taken": sum(result.statistics.steps.values()),
        "updates": result.updates,
        "events": [event.kind for event in result.events],
    }


def main(namespace: str, *jobs: str) -> None:
    engine = Linked(Elsewhere(namespace))
    torch.set_num_threads(1)
    for job in jobs:
        what, *words = job.split()
        found = {"train": train, "cut": cut, "measure": measure}[what](engine, *words)  # type: ignore[operator]
        print(json.dumps({job: found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

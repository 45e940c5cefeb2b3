"""Ray nodes on one machine, each in a network namespace of its own, and a driver on the first.

Each node has its own processes, its own /tmp/ray and its share of the cores; all of it ends when the node's first process
does, and that ends with this one. Needs root, iproute2 and util-linux. Not responsible for what the driver runs.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.link import ADDRESSES, NAMESPACES, Link, command
from benchmarks.machine import ROOT
from benchmarks.peers.team import START_S, PeerError

PORT = 6379
STORE = 3 << 30  # bytes of each node's object store: a dozen gradients of 38 M
TEMPORARY = Path("/tmp/ray")
PRIVATE = ("unshare", "-m", "-p", "--fork", "--kill-child", "--mount-proc")
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


def shares(cores: Sequence[int], nodes: int = 2) -> list[list[int]]:
    """The cores of the last two nodes, halves where there are two; one before them, for shards alone, has all."""
    half = len(cores) // 2
    return [list(cores)] * (nodes - 2) + (
        [list(cores[:half]), list(cores[half:])] if half else [list(cores)] * 2
    )


class Node:
    """A raylet in a namespace; the first is the head."""

    def __init__(self, side: int, link: Link, learners: int, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the node
        cores = ",".join(map(str, shares(sorted(os.sched_getaffinity(0)), len(link.namespaces))[side]))
        self.pinned = pinned = ("taskset", "-c", cores)
        words = ["ray", "start", "--block", f"--node-ip-address={ADDRESSES[side]}", f"--num-cpus={learners}"]
        words += [f"--object-store-memory={STORE}", "--disable-usage-stats"]
        words += (
            ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if side == 0
            else [f"--address={ADDRESSES[0]}:{PORT}"]
        )
        start = f"mount -t tmpfs tmpfs {TEMPORARY} && exec {Path(sys.executable).parent}/{' '.join(words)}"
        self._process = subprocess.Popen(
            [
                *WITH_PARENT,
                "nsenter",
                f"--net={NAMESPACES / link.namespaces[side]}",
                *pinned,
                *PRIVATE,
                "sh",
                "-c",
                start,
            ],
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def first(self) -> int:
        """The process whose end is the node's."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return int(children.read_text().split()[0])

    def wait_up(self) -> None:
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in self.said():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PeerError(f"no Ray node came up in a network namespace: {self.said()[-2000:]}")
            time.sleep(0.05)

    def said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        """At once: nothing of it is worth an orderly end."""
        self._process.kill()
        self._process.wait()
        self._log.close()


class RayNodes:
    """A node for each side of the link, with `learners` cores each in Ray's eyes."""

    def __init__(self, link: Link, learners: int) -> None:
        self._link, self._learners = link, learners
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment |= {"PYTHONPATH": path}
        self._nodes: list[Node] = []
        self._driver: Driver | None = None

    def __enter__(self) -> Self:
        command(*PRIVATE, "true")
        TEMPORARY.mkdir(exist_ok=True)
        try:
            for side in range(len(self._link.namespaces)):
                self._nodes.append(Node(side, self._link, self._learners, self.environment))
                self._nodes[side].wait_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, order: Mapping[str, Any], limit_s: float) -> Any:
        """What the driver answers; after a failure the next order gets a new one."""
        if self._driver is None:
            self._driver = Driver(self._nodes[0], self.environment)
        try:
            return self._driver.ask(order, limit_s)
        except BaseException:
            self._driver.close()
            self._driver = None
            raise

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
        for node in reversed(self._nodes):
            node.close()


class Driver:
    """A process on the head: takes orders as lines, answers each with a line."""

    def __init__(self, head: Node, environment: Mapping[str, str]) -> None:
        inside = ["nsenter", "-t", str(head.first), "-n", "-m", "-p", *head.pinned]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the driver
        self._process = subprocess.Popen(
            [*WITH_PARENT, *inside, sys.executable, "-m", "benchmarks.cluster_driver"],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )

    def ask(self, order: Mapping[str, Any], limit_s: float) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        former = signal.signal(signal.SIGALRM, _late)
        signal.alarm(max(1, round(limit_s)))
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, former)
        if not line:
            self._said.seek(0)
            raise PeerError(f"the driver died: {self._said.read()[-2000:]}")
        answer = json.loads(line)
        if "failed" in answer:
            raise PeerError(answer["failed"])
        return answer["answer"]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._said.close()


def _late(number: int, frame: object) -> None:
    raise PeerError("no answer in time")

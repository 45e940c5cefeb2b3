"""Network namespaces joined by links of a given rate: a network of two machines, or of more around a switch, on one.

Needs root and iproute2. What a link makes is gone when it is closed, after an exception and Ctrl-C too; what a
killed process left is removed by the next one. Not responsible for what runs in the namespaces.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

PREFIX = "syncline-link"
INTERFACE = "link0"  # in both namespaces
ADDRESSES = ("10.203.77.1", "10.203.77.2", "10.203.77.3", "10.203.77.4")
SWITCH = "switch0"  # in the namespace after those of the sides
BURST_KB = 128  # more than a packet of the host's own segmentation, 64 KB
LATENCY_MS = 100  # that the queue before the link may hold
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")


class LinkError(RuntimeError):
    """The link cannot be made here; the message says what to do."""


class Link:
    """A veth pair between two namespaces, or one from each to a switch, every way held to `mbit` Mbit/s by a token bucket.

    None: as fast as it is.
    """

    def __init__(
        self, mbit: float | None, *, burst_kb: int = BURST_KB, latency_ms: int = LATENCY_MS, sides: int = 2
    ) -> None:
        if mbit is not None and not mbit > 0:
            raise LinkError(f"the rate of a link must be above 0 Mbit/s, got {mbit}")
        self.mbit = mbit
        self._shaping = shaping(mbit, burst_kb, latency_ms) if mbit is not None else None
        self._former: Any = signal.SIG_DFL
        names = tuple(f"{PREFIX}-{os.getpid()}-{side}" for side in range(sides + (sides > 2)))
        self.namespaces, self._switch = names[:sides], names[sides:]

    def __enter__(self) -> Self:
        check_possible()
        remove_left()
        self._former = signal.signal(signal.SIGTERM, _leave)  # so that __exit__ runs
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make(self) -> None:
        for namespace in self.namespaces + self._switch:
            command("ip", "netns", "add", namespace)
            command("ip", "-n", namespace, "link", "set", "lo", "up")
        if self._switch:
            self._make_switch(*self._switch)
        else:
            first, second = self.namespaces
            self._join(first, second, INTERFACE)
        for namespace, address in zip(self.namespaces, ADDRESSES, strict=False):
            command("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE)

    def _make_switch(self, switch: str) -> None:
        inside = ("ip", "-n", switch, "link")
        command(*inside, "add", SWITCH, "type", "bridge")
        command(*inside, "set", SWITCH, "up")
        for side, namespace in enumerate(self.namespaces):
            self._join(namespace, switch, f"port{side}")
            command(*inside, "set", f"port{side}", "master", SWITCH)

    def _join(self, namespace: str, other: str, port: str) -> None:
        """A pair between the two, up and shaped: a side's interface and the other's port."""
        ends = ("netns", namespace, "type", "veth", "peer", "name", port, "netns", other)
        command("ip", "link", "add", INTERFACE, *ends)
        for place, interface in ((namespace, INTERFACE), (other, port)):
            command("ip", "-n", place, "link", "set", interface, "up")
            if self._shaping is not None:
                command("tc", "-n", place, "qdisc", "add", "dev", interface, *self._shaping)

    def close(self) -> None:
        """Its pair of interfaces goes with the namespaces."""
        signal.signal(signal.SIGTERM, self._former)
        for namespace in self.namespaces + self._switch:
            if (NAMESPACES / namespace).exists():
                with contextlib.suppress(LinkError):
                    command("ip", "netns", "delete", namespace)


def shaping(mbit: float, burst_kb: int = BURST_KB, latency_ms: int = LATENCY_MS) -> tuple[str, ...]:
    """What holds an end of the link to its rate, in tc's words."""
    rate, burst, wait = f"{round(mbit * 1000)}kbit", f"{burst_kb}kb", f"{latency_ms}ms"
    return ("root", "tbf", "rate", rate, "burst", burst, "latency", wait)


def check_possible() -> None:
    if os.geteuid() != 0:
        raise LinkError("making network namespaces needs root: run it as root")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise LinkError(f"{' and '.join(missing)} not found: install iproute2")


def remove_left() -> None:
    """Namespaces of processes that are no more."""
    for namespace in left(names() if NAMESPACES.exists() else [], Path("/proc")):
        command("ip", "netns", "delete", namespace)


def names() -> list[str]:
    return [file.name for file in NAMESPACES.iterdir()]


def left(namespaces: list[str], processes: Path) -> list[str]:
    """Those of ours whose process does not run."""
    found = [(name, re.fullmatch(rf"{PREFIX}-(\d+)-[0-4]", name)) for name in namespaces]
    return sorted(name for name, match in found if match and not (processes / match[1]).exists())


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise LinkError(f"'{' '.join(words)}' failed: {done.stderr.strip() or done.returncode}")


def enter(namespace: str) -> None:
    """Move this thread, and all that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(NAMESPACES / namespace, "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise LinkError(f"cannot enter the namespace {namespace}: {os.strerror(code)}")


def traffic(interface: str = INTERFACE) -> tuple[int, int]:
    """Bytes that this process's network has sent and received over the interface; nothing without one."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            words = counts.split()
            return int(words[8]), int(words[0])
    return 0, 0


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

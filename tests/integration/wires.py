"""A wire between nodes that tests can cut, silence, and put words on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from syncline.engines.ray.authentication import HELLO, MAC, NONCE
from syncline.engines.ray.bulk_connection import _HEAD

KEPT = 1 << 16  # bytes


class ControlConnection:
    """Listens in front of an address and passes on what comes, both ways; one for each `through`."""

    def __init__(self) -> None:
        self._doors: list[socket.socket] = []
        self.ends: list[tuple[socket.socket, socket.socket]] = []  # the caller's, the agent's
        self.said: list[bytearray] = []  # by callers, on each connection; its beginning
        self.passed = self.came = 0  # bytes of callers, of agents
        self._speaks = {"there": threading.Event(), "back": threading.Event()}
        self.speak()

    def through(self, address: tuple[str, int]) -> tuple[str, int]:
        door = socket.create_server(("127.0.0.1", 0))
        self._doors.append(door)
        threading.Thread(target=self._accept, args=(door, address), daemon=True).start()
        found: tuple[str, int] = door.getsockname()[:2]
        return found

    def _accept(self, door: socket.socket, address: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = door.accept()
                far = socket.create_connection(address)
                self.ends.append((near, far))
                self.said.append(bytearray())
                for pair in ((near, far, self.said[-1]), (far, near, None)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, said: bytearray | None) -> None:
        speaks = self._speaks["back" if said is None else "there"]
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if said is not None:
                    self._counted(data, said)
                else:
                    self.came += len(data)
                speaks.wait()
                target.sendall(data)
            speaks.wait()
        self._end(source, target)

    def _counted(self, data: bytes, said: bytearray) -> None:
        self.passed += len(data)
        said += data[: KEPT - len(said)]

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def silence(self, *ways: str) -> None:
        """Nothing passes, "there" or "back" or both, and nobody is told."""
        for way in ways or self._speaks:
            self._speaks[way].clear()

    def speak(self) -> None:
        for way in self._speaks.values():
            way.set()

    def cut(self) -> None:
        for pair in self.ends:
            self._end(*pair)

    def close(self) -> None:
        self.speak()
        self._end(*self._doors)
        self.cut()
        for end in (*self._doors, *(end for pair in self.ends for end in pair)):
            end.close()


class Stalling(ControlConnection):
    """Falls silent after a megabyte."""

    def _counted(self, data: bytes, said: bytearray) -> None:
        super()._counted(data, said)
        if self.passed > 1 << 20:
            self.silence()


class Late(ControlConnection):
    """Of all connections after an agent's first two (its pulse, its supervisor's) nothing passes before `let`: those are relays'."""

    def __init__(self) -> None:
        self._let = threading.Event()
        super().__init__()

    def _pass_on(self, source: socket.socket, target: socket.socket, said: bytearray | None) -> None:
        if any(said is each for each in self.said[2:]):
            self._let.wait()
        super()._pass_on(source, target, said)

    def let(self) -> None:
        self._let.set()

    def close(self) -> None:
        self.let()
        super().close()


class Repeating(ControlConnection):
    """Says every small frame of a learner twice."""

    def _pass_on(self, source: socket.socket, target: socket.socket, said: bytearray | None) -> None:
        if source not in [far for _, far in self.ends]:
            super()._pass_on(source, target, said)
            return
        with contextlib.suppress(OSError), source.makefile("rb") as words:
            target.sendall(words.read(len(HELLO) + NONCE))
            target.sendall(words.read(MAC))
            while len(head := words.read(_HEAD.size)) == _HEAD.size:
                frame = head + words.read(_HEAD.unpack(head)[-1])
                target.sendall(frame * (2 if len(frame) < 4096 else 1))
        self._end(source, target)


@contextlib.contextmanager
def wire(kind: type[ControlConnection] = ControlConnection) -> Iterator[ControlConnection]:
    made = kind()
    try:
        yield made
    finally:
        made.close()

"""Who may connect: the run's own, proven on fresh nonces; strangers are counted and keep nobody waiting."""

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from syncline.engines import authentication as handshake
from syncline.engines.authentication import HELLO, MAC, NONCE, Listener, Secret, Stranger, connect


class Door:
    """A listener with those that it welcomed."""

    def __init__(self) -> None:
        self.secret = Secret.new()
        self.welcome: queue.Queue[socket.socket] = queue.Queue()
        self.listener = Listener("127.0.0.1", self.secret, self.welcome.put)

    def raw(self) -> socket.socket:
        return socket.create_connection(self.listener.address)

    def strangers(self, count: int) -> None:
        """Wait until so many were turned away."""
        while self.listener.strangers < count:
            threading.Event().wait(0.001)


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.listener.close()
    while not made.welcome.empty():
        made.welcome.get().close()


def exactly(end: socket.socket, length: int) -> bytes:
    return end.recv(length, socket.MSG_WAITALL)


def test_who_knows_the_secret_is_welcomed(door: Door) -> None:
    with connect(door.listener.address, door.secret) as end, door.welcome.get(timeout=10) as there:
        end.sendall(b"ours")
        assert exactly(there, 4) == b"ours"
    assert door.listener.strangers == 0


@pytest.mark.parametrize("other", [lambda s: Secret(s.run, b"guess"), lambda s: Secret(b"another!", s.key)])
def test_who_has_another_secret_or_is_of_another_run_is_not(door: Door, other) -> None:
    with pytest.raises(Stranger):
        connect(door.listener.address, other(door.secret))
    door.strangers(1)
    assert door.welcome.empty()


def test_what_was_heard_once_cannot_be_said_again(door: Door) -> None:
    """A caller's words are recorded by somebody in the middle and said to the listener anew."""
    with socket.create_server(("127.0.0.1", 0)) as middle:
        caller = threading.Thread(target=lambda: connect(middle.getsockname()[:2], door.secret).close())
        caller.start()
        near, _ = middle.accept()
        with near, door.raw() as far:
            near.sendall(exactly(far, len(HELLO) + NONCE))
            said = exactly(near, NONCE + MAC)
            far.sendall(said)
            near.sendall(exactly(far, MAC))
            caller.join()
    door.welcome.get(timeout=10).close()
    with door.raw() as again:
        exactly(again, len(HELLO) + NONCE)
        again.sendall(said)
        assert again.recv(1) == b""
    door.strangers(1)
    assert door.welcome.empty()


def test_a_listener_that_does_not_know_the_secret_is_left_alone(door: Door) -> None:
    with socket.create_server(("127.0.0.1", 0)) as false:

        def pretend() -> None:
            end, _ = false.accept()
            with end:
                end.sendall(HELLO + os.urandom(NONCE))
                exactly(end, NONCE + MAC)
                end.sendall(os.urandom(MAC))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(Stranger, match="does not know the run's secret"):
            connect(false.getsockname()[:2], door.secret)
        thread.join()


def test_silent_strangers_and_such_that_say_nonsense_keep_nobody_waiting(door: Door) -> None:
    silent = [door.raw() for _ in range(2 * handshake.WAITING)]
    for loud in silent[::3]:
        loud.sendall(os.urandom(200))
    connect(door.listener.address, door.secret).close()
    door.welcome.get(timeout=10).close()
    for end in silent:
        end.close()
    door.strangers(len(silent))


def test_who_says_nothing_is_turned_away_after_a_while(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 0.05)
    with door.raw() as silent:
        exactly(silent, len(HELLO) + NONCE)
        assert silent.recv(1) == b""
    door.strangers(1)


def test_a_secret_is_not_printed(door: Door) -> None:
    assert door.secret.key.hex() not in repr(door.secret)
    assert str(door.secret.key) not in str(door.secret)


WITHOUT_DESCRIPTORS = """
import logging, os, resource, socket, threading
from syncline.engines.authentication import Listener, Secret, connect

logged, words = threading.Event(), []

class Collect(logging.Handler):
    def emit(self, record):
        words.append(record.getMessage())
        logged.set()

logging.getLogger("syncline").addHandler(Collect())

def fill():
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        return held

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
secret = Secret.new()
served = threading.Semaphore(0)

def serve(end):
    end.close()
    served.release()

listener = Listener("127.0.0.1", secret, serve)
early, late = socket.socket(), socket.socket()

held = fill()
early.connect(listener.address)
assert logged.wait(60)
for each in held:
    os.close(each)
for _ in range(2):
    connect(listener.address, secret).close()
assert early.recv(1), "the connection that could not be accepted was accepted later"
assert len(words) == 1 and "Too many open files" in words[0] and str(listener.address[1]) in words[0], words

early.close()
served.acquire()
served.acquire()
while not listener.strangers:  # its descriptor is free again only now
    threading.Event().wait(0.001)
logged.clear()
held = fill()
late.connect(listener.address)
assert logged.wait(60)
listener.close()
for thread in threading.enumerate():
    if thread.name == "syncline-listener":
        thread.join(60)
        assert not thread.is_alive()
"""


def test_a_listener_outlives_failed_accepts_logs_them_and_still_ends_when_it_is_closed() -> None:
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr

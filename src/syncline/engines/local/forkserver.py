"""Where processes come from: a small server with torch imported that forks on request.

It never imports the caller's `__main__` and never touches CUDA, so no main guard is needed and children may
use GPUs. It imports everything a child needs first (an optimizer's first step pulls in a second of torch), runs one thread, and lives as long
as the caller. Children that end are reaped here, then announced. A child sets itself up, then runs what it is told to; it watches the
caller's life line (a pipe whose only write end is the caller's) and ends when it breaks.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import torch

from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.shared_memory import crash_at
from syncline.engines.malloc_tuning import keep_freed_memory
from syncline.errors import RunError

CHILD_FDS = 4  # control socket, stdout, stderr, the caller's life line
MANY = 24  # children after which it pays to make the next ones cheaper
TERM_GRACE = 20.0  # seconds that a child goes on after SIGTERM
is_child = False  # this process is a run's: a learner, a shard, an evaluator or another

Run = Callable[[Channel], int | None]  # what a child does; gives its exit code


@dataclass(frozen=True, slots=True)
class Ended:
    """A child was reaped; a negative code is the signal that ended it."""

    pid: int
    code: int


# -- the caller's side -------------------------------------------------------------------------------------

_lock = threading.Lock()
_server: tuple[int, socket.socket, subprocess.Popen[bytes] | _Forked] | None = None


def connect() -> Channel:
    """A connection of its own for one run; the server starts with the first."""
    global _server
    with _lock:
        if _server is None or _server[0] != os.getpid() or _server[2].poll() is not None:
            _server = (os.getpid(), *_start())
        mine, theirs = Channel.pair()
        try:
            socket.send_fds(_server[1], [b"r"], [theirs.fileno()])
        except BrokenPipeError as error:
            _server = None
            raise RunError("the fork server ended unexpectedly; run again") from error
        theirs.close()
        return mine


class _Forked:
    """A server forked from this very process, as `subprocess` shows one that it started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        ready = select.select([self._pidfd], [], [], timeout)[0]
        code = self.poll() if ready else None
        if code is None:
            raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
        return code

    def poll(self) -> int | None:
        if self._code is None and os.waitpid(self.pid, os.WNOHANG)[0] == self.pid:
            self._code = 0
            os.close(self._pidfd)
        return self._code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def start_here() -> None:
    """Make this process's own fork the server: for callers that have just begun, with one thread and no GPU in use.

    Everything is imported once instead of twice, which halves the time to the first update.
    """
    global _server
    with _lock:
        if _server is not None or threading.active_count() > 1:
            return
        _warm_up()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pid = os.fork()
        if pid == 0:
            try:
                mine.close()
                _lock.release()  # forked while it is held: a learner that launches a run takes it
                os.setsid()  # the terminal's Ctrl-C is the caller's to handle
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                serve(theirs.detach())
            finally:
                os._exit(1)
        theirs.close()
        _server = (os.getpid(), mine, _Forked(pid))


def _start() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    code = f"from syncline.engines.local.forkserver import serve; serve({theirs.fileno()})"
    paths = [path for path in sys.path if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[theirs.fileno()],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C is the caller's to handle
    )
    theirs.close()
    return mine, process


def pid() -> int | None:
    """Of this process's server, if it has one."""
    return _server[2].pid if _server is not None and _server[0] == os.getpid() else None


@atexit.register
def shutdown() -> None:
    """End the fork server (it also ends by itself with the caller)."""
    global _server
    if _server is not None and _server[0] == os.getpid():
        _server[1].close()
        try:
            _server[2].wait(5)
        except subprocess.TimeoutExpired:
            _server[2].kill()
            _server[2].wait()
        _server = None


# -- the server's side -------------------------------------------------------------------------------------


def _warm_up() -> None:
    """Everything that children would otherwise import one by one."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    torch.optim.SGD([parameter], lr=0.1).step()  # not Adam: it counts GPUs, and then no child could use one
    from syncline.engines.local import (  # noqa: F401 - all that children do
        allreduce_learner,
        batch_processes,
        seat_processes,
        server,
        tree_node,
    )


def serve(fd: int) -> None:
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to all: it lives as long as the caller
    _warm_up()
    gc.collect()
    gc.freeze()
    _Server(socket.socket(fileno=fd)).run()
    os._exit(0)  # there is nothing to clean up, and modules may complain on their way out


def _join_pages() -> None:
    """Make huge pages of this process's memory: a fork copies an entry per page, so that a child takes half the time.

    It takes a moment itself, and a kernel that cannot (before 6.1) refuses without harm.
    """
    collapse = 25  # MADV_COLLAPSE
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file]
    for span, mode, _, _, _, *path in lines:
        if mode == "rw-p" and path in ([], ["[heap]"]):
            low, high = (int(bound, 16) for bound in span.split("-"))
            madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), collapse)


class _Server:
    def __init__(self, caller: socket.socket) -> None:
        self._caller = caller
        self._started = 0
        self._runs: dict[int, Channel] = {}  # descriptor -> a run's connection
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, run's descriptor)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._caller, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._caller.fileno():
                    data, fds, _, _ = socket.recv_fds(self._caller, 1, 1)
                    if not data:
                        children = [child for child, _ in self._children.values()]
                        for child in children:
                            os.kill(child, signal.SIGKILL)
                        for child in children:
                            os.waitpid(child, 0)
                        return
                    channel = Channel(socket.socket(fileno=fds[0]))
                    self._runs[channel.fileno()] = channel
                    poll.register(channel.fileno(), select.POLLIN)
                elif fd in self._children:
                    self._reap(fd, poll)
                elif fd in self._runs:
                    self._serve(fd, poll)

    def _serve(self, fd: int, poll: select.poll) -> None:
        """A run asks for a child on these descriptors (control, stdout, stderr, life line), or has ended."""
        channel = self._runs[fd]
        try:
            data, fds, _, _ = socket.recv_fds(channel._socket, 1, CHILD_FDS)
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            poll.unregister(fd)
            self._runs.pop(fd).close()
            for child, owner in self._children.values():
                if owner == fd:
                    os.kill(child, signal.SIGKILL)
            self._rest()
            return
        self._started += 1
        pid = os.fork()
        if pid == 0:
            self._become(fds)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, fd)
        poll.register(pidfd, select.POLLIN)
        for each in fds:
            os.close(each)
        channel.try_send(pid)

    def _become(self, fds: list[int]) -> None:
        """In the child: drop everything of the server's, then never return."""
        code = 1
        try:
            self._caller.close()
            for channel in self._runs.values():
                channel.close()
            for pidfd in self._children:
                os.close(pidfd)
            gc.enable()
            code = main(*fds)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self, pidfd: int, poll: select.poll) -> None:
        pid, run = self._children.pop(pidfd)
        poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if run in self._runs:
            self._runs[run].try_send(Ended(pid, os.waitstatus_to_exitcode(status)))

    def _rest(self) -> None:
        """Between two runs of many."""
        if self._started >= MANY and not self._runs:
            self._started = -(1 << 62)  # once is enough
            _join_pages()


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


# -- a child -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a child."""

    role: str  # "learner", "shard", "node" or "evaluator"
    threads: int
    path: list[str]
    folder: str
    environment: dict[str, str]
    crash: int | None  # for tests: the operation it dies in
    run: Run  # what the process does, until it is told that nothing more comes


def main(control: int, out: int, err: int, life_line: int) -> int:
    """The whole life of a child; the exit code comes back."""
    global is_child
    is_child = True
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _outlive_sigterm()
    _redirect(out, err)

    def watch() -> None:
        os.read(life_line, 1)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()
    channel = Channel(socket.socket(fileno=control))
    try:
        setup: Setup = channel.receive()
        _settle(setup)
        if setup.role in ("learner", "relay"):
            keep_freed_memory()
        return setup.run(channel) or 0
    except Closed:
        return 1


def _outlive_sigterm() -> None:
    """Schedulers send it to all processes at once: it is the caller's to end the run well, while this one works on.

    Whoever means this one alone has it gone a while later. What the user's code forks goes at once, as anywhere.
    """
    own = os.getpid()

    def heed(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        end = threading.Timer(TERM_GRACE, os.kill, (own, signal.SIGKILL))
        end.daemon = True
        end.start()

    signal.signal(signal.SIGTERM, heed)
    signal.siginterrupt(signal.SIGTERM, False)


def _redirect(out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _settle(setup: Setup) -> None:
    sys.path[:] = setup.path
    os.environ.clear()
    os.environ.update(setup.environment)
    if os.path.isdir(setup.folder):
        os.chdir(setup.folder)
    torch.set_num_threads(setup.threads)
    if setup.crash is not None:
        crash_at(setup.crash)

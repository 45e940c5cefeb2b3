"""Interpreters that have torch and syncline imported already, for tests that run scripts: ready in 0.1 s in place of three.

`ReadyPython` is a `subprocess.Popen` whose process is forked from a warm one with a single thread, runs the script as `__main__`
and ends as interpreters do; its first run finds a fork server that was forked as well. A few tests start from nothing on purpose
(`test_cli.py`, `test_examples.py`, `test_processes.py`); with FRESH_INTERPRETERS=1 all do.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
from typing import Any

from syncline.testing import leftovers

FRESH = os.environ.get("FRESH_INTERPRETERS") == "1"
SUBREAPER = 36  # of prctl: orphans become this process's children
_warm: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def _warm_one() -> socket.socket:
    """This process's own; it ends with it."""
    global _warm
    if _warm is None or _warm[0].poll() is not None:
        ask, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        leftovers.warm.add(process.pid)
        _warm = process, ask
    return _warm[1]


def end() -> None:
    global _warm
    if _warm is not None:
        process, ask = _warm
        ask.close()
        process.wait()
        _warm = None


class ReadyPython(subprocess.Popen[Any]):
    """`Popen([sys.executable, …])`, with the options that tests use."""

    if not FRESH:

        def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
            """In place of `fork` and `exec`."""
            (_, pass_fds, cwd, env, *_), ends, session = rest[:7], rest[7:13], rest[18]
            stdin, _, _, stdout, _, stderr = ends
            assert args[0] == sys.executable and preexec_fn is None and not pass_fds
            words = [os.fspath(word) for word in args[1:] if word != "-u"]
            asked = (words, os.fspath(cwd or os.getcwd()), dict(env or os.environ), session)
            given = [end if end >= 0 else own for own, end in enumerate((stdin, stdout, stderr))]
            ask = _warm_one()
            prctl = ctypes.CDLL(None).prctl
            prctl(SUBREAPER, 1, 0, 0, 0)  # so that it becomes this process's child
            try:
                socket.send_fds(ask, [pickle.dumps(asked)], given)
                self.pid = int(ask.recv(16))
            finally:
                prctl(SUBREAPER, 0, 0, 0, 0)
            self._child_created = True
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def run_ready(arguments: list[Any], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, …], capture_output=True, text=True)`."""
    pipe = subprocess.PIPE
    with ReadyPython([sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


# -- the warm one --------------------------------------------------------------------------------------------


def _wait_to_be_asked(ask: socket.socket) -> list[str]:
    """Fork whoever is asked for; returns in that process, with its arguments."""
    while True:
        asked, fds, _, _ = socket.recv_fds(ask, 1 << 18, 3)
        if not asked:
            os._exit(0)
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child == 0:
                for fd in (ask.detach(), read, write):
                    os.close(fd)
                return _become(fds, *pickle.loads(asked))
            os.write(write, str(child).encode())
            os._exit(0)
        os.waitpid(middle, 0)  # whose child is an orphan now
        ask.send(os.read(read, 16))
        for fd in (read, write, *fds):
            os.close(fd)


def _become(
    fds: list[int], words: list[str], folder: str, environment: dict[str, str], session: bool
) -> list[str]:
    if session:
        os.setsid()
    for own, fd in enumerate(fds):
        os.dup2(fd, own)
        os.close(fd)
    gc.unfreeze()  # else what C++ modules hold is not cleared at the end, and they say so
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, buffering=1, closefd=False)  # noqa: SIM115
        for fd, mode in enumerate("rww")
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    forkserver.start_here()
    return words


if __name__ == "__main__":
    import syncline
    from syncline.engines.local import forkserver

    forkserver._warm_up()
    for public in syncline.__all__:  # scripts find all of it imported
        getattr(syncline, public)
    gc.collect()
    gc.freeze()
    words = _wait_to_be_asked(socket.socket(fileno=int(sys.argv[1])))
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            code = compile(words[1], "<string>", "exec")
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            with open(words[0]) as file:
                code = compile(file.read(), words[0], "exec")
        __file__ = words[0]
        for name in [name for name in globals() if not name.startswith("__") and name != "code"]:
            del globals()[name]
        exec(globals().pop("code"))

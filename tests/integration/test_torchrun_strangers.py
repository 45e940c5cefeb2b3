"""Ranks under torchrun and a stranger that reads all of torchrun's store: it learns no secret and can run nothing on rank 0."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import pickle
import re
import signal
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from syncline.engines.authentication import KEY, RUN, Secret, Stranger, connect
from tests.integration.test_torchrun import HEAD, finish, heard, read, script, torchrun

WORDS = "a secret of more than sixteen characters"
NOBODY = 65534

MEET = """
import logging
logging.basicConfig()
rank = os.environ["RANK"]
write("ready", pid=os.getpid(), port=int(os.environ["MASTER_PORT"]))
while rank == "1" and not os.path.exists(sys.argv[1] + "/gate"):
    time.sleep(0.01)

def learner(session):
    mean = session.mean(torch.tensor([1.0, session.rank]))
    return session.rank, mean.tolist()

write("met", returned=sl.launch(learner, topology="allreduce").returned)
"""
MET = [[0, [1.0, 0.5]], [1, [1.0, 0.5]]]


class Command:
    """Run a shell command when unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def one_host(folder: Path) -> list[subprocess.Popen[str]]:
    return [torchrun("--standalone", "--nproc-per-node=2", script(folder, HEAD, MEET), folder)]


def several_hosts(folder: Path, *secrets: str) -> list[subprocess.Popen[str]]:
    """Start two torchruns, each of which takes the other for another host."""
    with socket.create_server(("127.0.0.1", 0)) as end:
        port = end.getsockname()[1]
    path = script(folder, HEAD, MEET)
    nodes = []
    for node, words in enumerate(secrets):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SYNCLINE_SECRET", words)
            at = (f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
            nodes.append(torchrun("--nnodes=2", "--nproc-per-node=1", *at, path, folder))
    return nodes


@contextlib.contextmanager
def killed(folder: Path, *processes: subprocess.Popen[str]) -> Iterator[None]:
    """Let nothing of a run outlive a test, in which rank 0 may wait for others that never come."""
    try:
        yield
    finally:
        found = [int(json.loads(path.read_text())["pid"]) for path in folder.glob("ready.*.json")]
        ranks = [
            pid for pid in found if str(folder).encode() in command_of(pid)
        ]  # else the number is another's
        for end, pid in (*((os.killpg, each.pid) for each in processes), *((os.kill, pid) for pid in ranks)):
            with contextlib.suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(ValueError):  # its output was read already
                process.communicate()


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def ready(folder: Path, rank: int) -> dict[str, Any]:
    while not (found := read(folder, "ready", rank)):
        time.sleep(0.01)
    return found


def everything_in_the_store(port: int) -> dict[str, bytes]:
    """Return all keys and values that a stranger finds while rank 0 waits for rank 1."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while not any("syncline" in key for key in store.list_keys()):
        time.sleep(0.01)
    return {key: store.get(key) for key in store.list_keys()}


def ports_of(pid: int) -> set[int]:
    """Return the TCP ports at which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(link)))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.add(int(columns[1].rpartition(":")[2], 16))
    return found


def secrets_in(values: dict[str, bytes]) -> list[Secret]:
    """Return every combination of a value's or field's bytes as a run's name and key."""
    pieces = list(values.values())
    for value in values.values():
        with contextlib.suppress(ValueError):
            record = json.loads(value)
            texts = (
                [field for field in record.values() if isinstance(field, str)]
                if isinstance(record, dict)
                else []
            )
            pieces += [text.encode() for text in texts]
            for text in texts:
                with contextlib.suppress(ValueError):
                    pieces.append(base64.b64decode(text, validate=True))
    runs = {piece[:RUN] for piece in pieces}
    keys = {piece[start : start + KEY] for piece in pieces for start in (0, RUN)} | {b""}
    return [Secret(run, key) for run in runs for key in keys]


def attack(ports: set[int], values: dict[str, bytes], marker: Path) -> int:
    """Try all values of the store on all ports, send a command where the handshake passes, and count those."""
    command, convinced = pickle.dumps(Command(f"touch {marker}")), 0
    for port in ports:
        for secret in secrets_in(values):
            try:
                end = connect(("127.0.0.1", port), secret)
            except (Stranger, OSError):
                continue
            convinced += 1
            with end, contextlib.suppress(OSError):
                end.sendall(struct.pack("!Q", len(command)) + command)
                end.shutdown(socket.SHUT_WR)
                end.settimeout(20)
                while end.recv(100):
                    pass
    return convinced


def test_a_stranger_that_reads_the_store_runs_nothing_on_rank_0_of_one_host(tmp_path: Path) -> None:
    run, marker = one_host(tmp_path), tmp_path / "ran"
    with killed(tmp_path, *run):
        zero = ready(tmp_path, 0)
        values = everything_in_the_store(ready(tmp_path, 1)["port"])
        ports = ports_of(zero["pid"])
        convinced = attack(ports, values, marker)
        assert (marker.exists(), convinced) == (False, 0), "a stranger's command ran on rank 0"
        assert ports == set(), "rank 0 waits for the others at no port"
        (folder,) = [Path(json.loads(value)["folder"]) for key, value in values.items() if "syncline" in key]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
        if os.getuid() == 0:
            cannot_connect(folder / "rank0")
        (tmp_path / "gate").touch()
        output = finish(*run)
    assert [process.returncode for process in run] == [0], output
    assert [read(tmp_path, "met", rank)["returned"] for rank in range(2)] == [MET, MET]
    assert not folder.exists() and "SYNCLINE_SECRET" not in output[0]


def cannot_connect(path: Path) -> None:
    """Assert that another user cannot reach the socket."""
    os.seteuid(NOBODY)
    try:
        with socket.socket(socket.AF_UNIX) as end, pytest.raises(PermissionError):
            end.connect(str(path))
    finally:
        os.seteuid(0)


def test_no_secret_of_several_hosts_is_in_the_store_and_who_has_none_is_refused(tmp_path: Path) -> None:
    run, marker = several_hosts(tmp_path, WORDS, WORDS), tmp_path / "ran"
    with killed(tmp_path, *run):
        zero = ready(tmp_path, 0)
        values = everything_in_the_store(zero["port"])
        ports = ports_of(zero["pid"])
        known = [WORDS.encode(), hashlib.sha256(WORDS.encode()).digest()]
        known += [base64.b64encode(each) for each in known] + [each.hex().encode() for each in known]
        assert not [key for key, value in values.items() if any(each in value for each in known)]
        assert (attack(ports, values, marker), marker.exists()) == (0, False)
        (tmp_path / "gate").touch()
        output = finish(*run)
    assert [process.returncode for process in run] == [0, 0], output
    assert [read(tmp_path, "met", rank)["returned"] for rank in range(2)] == [MET, MET]
    assert "is not set" not in output[0]
    assert output[0].count("refused a connection") == (1 if secrets_in(values) else 0), output[0]


def test_several_hosts_without_a_secret_are_warned_once(tmp_path: Path) -> None:
    run = several_hosts(tmp_path, "", "")
    (tmp_path / "gate").touch()
    output = finish(*run)
    assert [process.returncode for process in run] == [0, 0], output
    assert [read(tmp_path, "met", rank)["returned"] for rank in range(2)] == [MET, MET]
    assert [text.count("SYNCLINE_SECRET is not set") for text in output] == [1, 0], output


@pytest.mark.long
@pytest.mark.parametrize(
    "secrets, says",
    [
        ((WORDS, WORDS[::-1]), "SYNCLINE_SECRET must be the same"),
        ((WORDS, ""), "rank 0 has SYNCLINE_SECRET and rank 1 has not"),
        (("", WORDS), "rank 1 has SYNCLINE_SECRET and rank 0 has not"),
        ((WORDS, "short"), "SYNCLINE_SECRET has 5 characters"),
    ],
)
def test_a_host_with_another_secret_is_told_so(secrets: tuple[str, str], says: str, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    zero, one = several_hosts(tmp_path, *secrets)
    with killed(tmp_path, zero, one):
        ready(tmp_path, 0), ready(tmp_path, 1)
        assert "Error" in heard(one, says)

"""A learner's process under all-reduce: the port of its session on Gloo or NCCL, and the call of the user's function."""

from __future__ import annotations

import contextlib
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncline import messages as m
from syncline.engines.checkpoint_writer import Writer
from syncline.engines.collectives import CollectiveGroup
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.learner import call, returned, say
from syncline.engines.local.shared_memory import Region
from syncline.engines.run import Task
from syncline.learn.allreduce_session import AllReduceSession
from syncline.ports import CollectivePort, PeerLost, Progress, Reduction
from syncline.roles.allreduce_coordinator import Meet
from syncline.roles.checkpoint_manifest import restored
from syncline.roles.run_plan import Seat
from syncline.table.checkpoints import read

# What one learner shows the supervisor, in words: first the four whole numbers of its `Progress`, how far it is.
LOSS, WAITS, CALLS, HISTOGRAM = range(4, 8)


def board_bytes(most: int) -> int:
    """Return the bytes of a board with a word for every staleness up to `most`."""
    return 8 * (HISTOGRAM + most + 1)


def read_board(words: memoryview) -> Progress:
    started, version, gradients, examples = words[:LOSS]
    loss = struct.unpack("d", struct.pack("q", words[LOSS]))[0]
    histogram = {sigma: count for sigma, count in enumerate(words[HISTOGRAM:]) if count}
    return Progress(started, version, gradients, examples, loss, histogram)


@dataclass(frozen=True, slots=True)
class Broken:
    """A collective failed under it: somebody else is gone."""

    text: str


@dataclass(frozen=True, slots=True)
class SaveCopy:
    """The supervisor asks a learner of a run that has failed to save its copy."""


@dataclass(frozen=True, slots=True)
class AllReduceLearnerSpec:
    """A learner's own part of its setup."""

    seat: Seat
    meeting: str  # a file without a name, in the supervisor's hands: where the group finds itself
    board: Region
    stop: Region  # its first word: the run is to end
    nccl: bool
    folder: str | None = None  # of checkpoints
    resume: tuple[str, str] | None = None  # a checkpoint to go on from: its path, and its name for messages


class _Watched(Reduction):
    """A reduction whose waiting is shown."""

    def __init__(self, inner: Reduction, board: memoryview) -> None:
        self._inner, self._board = inner, board

    def wait(self, *, block: bool = True) -> bool:
        self._board[WAITS] = block
        try:
            return self._inner.wait(block=block)
        finally:
            self._board[WAITS] = 0


class LocalCollectivePort(CollectivePort):
    """All that such a session asks, on this machine."""

    def __init__(self, channel: Channel, spec: AllReduceLearnerSpec) -> None:
        self.rank, self.learners = spec.seat.rank, spec.seat.plan.learners
        self._channel, self._board = channel, spec.board.words
        self._stop = spec.stop.words
        self._folder, self._seats = spec.folder, spec.seat.seats
        self._writer: Writer | None = None  # once there is something to write
        self._board[WAITS] = 1
        store = dist.FileStore(spec.meeting, self.learners)
        self._group = CollectiveGroup(store, self.rank, self.learners, nccl=spec.nccl, host="127.0.0.1")
        self._board[WAITS] = 0

    def now(self) -> float:
        return time.monotonic()

    def reduce(self, buffer: Tensor) -> Reduction:
        self._board[CALLS] += 1
        return _Watched(self._group.reduce(buffer), self._board)

    def broadcast(self, buffer: Tensor) -> None:
        self._board[CALLS] += 1
        self._board[WAITS] = 1
        self._group.broadcast(buffer)
        self._board[WAITS] = 0

    def meet(self, what: str, value: Any) -> list[Any]:
        self._channel.send(Meet(what, value))
        return self._channel.receive()  # type: ignore[no-any-return]

    def tell(self, message: Any) -> None:
        if not isinstance(message, Progress):
            self._channel.send(message)
            return
        words = self._board
        numbers = message.started, message.version, message.gradients, message.examples
        for word, value in enumerate(numbers):
            words[word] = value
        words[LOSS] = struct.unpack("q", struct.pack("d", message.loss))[0]
        for sigma, count in message.histogram.items():
            words[HISTOGRAM + sigma] = count

    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        assert self._folder is not None
        self._writer = self._writer or Writer(Path(self._folder), self.tell)
        self._board[WAITS] = 1
        self._writer.write_after(number, name, tensors, notes)
        self._board[WAITS] = 0

    def save_failed(self, session: AllReduceSession) -> None:
        """Save this learner's copy if the supervisor asks for it; stay until it has read the answer and closes the channel."""
        if self._folder is None or self._seats > 1:
            return
        with contextlib.suppress(Closed):
            while True:
                if isinstance(self._channel.receive(), SaveCopy):
                    session.save_failed()

    def stopping(self) -> bool:
        return self._stop[0] != 0

    def left_loop(self, *, again: bool) -> None:
        self._channel.send(m.LeftLoop(again))

    def close(self) -> None:
        """Everybody leaves. Gloo's group may go with the process: that is quicker, and nothing complains."""
        if not self._group.sliced:
            self._group.close()


def run_peer(channel: Channel, spec: AllReduceLearnerSpec) -> int:
    """Call the user's function; say how it ended. Nobody leaves before the supervisor says so: others may still read."""
    port: LocalCollectivePort | None = None
    session: AllReduceSession | None = None
    try:
        task: Task = channel.receive()
        if torch.device(spec.seat.device).type == "cuda":
            torch.cuda.set_device(spec.seat.device)
        port = LocalCollectivePort(channel, spec)
        session = AllReduceSession(
            port, spec.seat, restored(read(*map(Path, spec.resume))) if spec.resume else None
        )
        value = call(task, session)
        session.close()
        sys.stdout.flush()
        channel.send(returned(value))
        channel.receive()
        port.close()
    except Closed:
        return 0
    except PeerLost as error:
        channel.try_send(Broken(str(error)))
        _save_failed(port, session)
        return 1
    except BaseException as error:
        say(channel, error)
        _save_failed(port, session)
        return 1
    return 0


def _save_failed(port: LocalCollectivePort | None, session: AllReduceSession | None) -> None:
    if port is not None and session is not None:
        port.save_failed(session)

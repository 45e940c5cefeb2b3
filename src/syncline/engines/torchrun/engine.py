"""A run whose learners, or seats of its one learner, torchrun has started: this process is one, the caller's thread runs its function.

Rank 0's server keeps the record; every rank returns the same result.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.checkpoint_writer import Writer
from syncline.engines.collectives import CollectiveGroup, MovesOf, wants_nccl
from syncline.engines.malloc_tuning import keep_freed_memory
from syncline.engines.process_titles import title_of, titled
from syncline.engines.run import Engine, Handle, Outcome, RunSpec
from syncline.engines.torchrun.connection import (
    Address,
    Apart,
    ControlConnection,
    Hello,
    MeetingValues,
    RankLeft,
    RunFailure,
    StopRun,
    as_brought,
    pickled,
    reach,
    unpickled,
)
from syncline.engines.torchrun.rank_and_store import Arrival, Refusal, TorchrunPlace, difference, next_store
from syncline.engines.torchrun.run_server import RunServer
from syncline.errors import LearnerError, LostError, RunError, UsageError
from syncline.learn.allreduce_session import AllReduceSession
from syncline.learn.local_update import GroupSession
from syncline.learn.model_factories import copied
from syncline.learn.train_and_evaluate import Training
from syncline.parallel.move import Joined, join
from syncline.ports import CollectivePort, Computing, PeerLost, Progress, Reduction, Serving
from syncline.roles.allreduce_coordinator import Meet, PeerClosed, apart, early

BLAME = 4.0  # seconds that a broken collective waits for the server's report of who broke it
GRACE = 25.0  # seconds that a step gets after a signal; torchrun waits for 30


class Line:
    """This rank's connection to the run's server, and the thread that reads it."""

    def __init__(self, wire: ControlConnection, rank: int) -> None:
        self._wire = wire
        wire.send(Hello(rank))
        self._changed = threading.Condition()
        self._answers: list[list[Any]] = []
        self.failure: BaseException | None = None
        self.outcome: Outcome | None = None
        self.stop = False
        self.calls = 0  # collectives so far
        self.rank = rank
        self._apart: list[Apart] = []
        self._groups: list[CollectiveGroup] = []
        self._joining = False
        self._thread = threading.Thread(target=self._hear, name="syncline-line", daemon=True)
        self._thread.start()

    def join(self, store: Any, place: TorchrunPlace, arrived: list[Arrival]) -> CollectiveGroup:
        """A group of all processes; whoever waits in it is thrown out when the run fails."""
        devices = [(each.host, each.device) for each in arrived]
        nccl = wants_nccl((arrived[place.rank].device,)) and len(set(devices)) == len(devices)
        self._joining = True
        host = "127.0.0.1" if place.one_host else None  # gradients of one host cross no network
        group = CollectiveGroup(store, place.rank, place.learners, nccl=nccl, host=host)
        self._groups.append(group)
        self._joining = False
        if self.failure is not None:
            self.abort()
        return group

    def abort(self) -> None:
        """Nobody waits in a group any more."""
        for group in self._groups:
            group.abort()

    def leave(self) -> None:
        """All groups that it has joined."""
        for group in self._groups:
            group.close()

    def send(self, message: Any) -> None:
        try:
            self._wire.send(message)
        except OSError as error:
            raise PeerLost(f"rank 0 cannot be reached: {error}") from error

    def _hear(self) -> None:
        while self.outcome is None and self.failure is None:
            try:
                message = self._wire.receive()
            except (OSError, EOFError):
                message = LostError("learner 0 is lost: its process ended, and the record with it")
            with self._changed:
                self._take(message)
                self._changed.notify_all()
        if self.failure is not None:
            self.abort()
        if self._joining:  # torch's own joining waits for minutes, and nothing gets a thread out of it
            time.sleep(BLAME)
            if self._joining:
                sys.stderr.write(f"{type(self.failure).__name__}: {self.failure}\n")
                sys.stderr.flush()
                os._exit(1)

    def _take(self, message: Any) -> None:
        match message:
            case MeetingValues():
                self._answers.append(message.values)
                self._apart = [other for other in self._apart if not other.what]
            case RunFailure():
                self.failure = message.error()
            case BaseException():
                self.failure = message
            case Outcome():
                self.outcome = message
            case Apart():
                self._apart.append(message)
                self._notice()
            case StopRun():
                self.stop = True

    def called(self) -> None:
        """One more collective begins."""
        self.calls += 1
        if self._apart:
            with self._changed:
                self._notice()
            if self.failure is not None:
                raise PeerLost

    def _notice(self) -> None:
        """Somebody does not come that would be needed."""
        for other in self._apart:
            if self.calls > other.calls and self.failure is None:
                if other.what:
                    self.failure = apart(other.rank, other.what, self.rank)
                else:
                    self.failure = early(other.rank, other.steps, self.rank, "a further step")

    def meet(self, what: str, value: Any) -> list[Any]:
        """Return what all ranks bring to this meeting, by rank; blocks until all have come."""
        self.send(Meet(what, value, self.calls))
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self.failure)
            if not self._answers:
                raise PeerLost
            return as_brought(value, self._answers.pop())

    def why(self, seconds: float) -> BaseException | None:
        """Return what has failed as soon as the server reports it; None after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, seconds)
            return self.failure

    def end(self) -> Outcome:
        """Wait for the record of the whole run."""
        with self._changed:
            self._changed.wait_for(lambda: self.outcome or self.failure)
        if self.outcome is None:
            assert self.failure is not None
            raise self.failure
        return self.outcome

    def close(self) -> None:
        self._wire.close()


class TorchrunPort(CollectivePort):
    """All that a session asks, in a process of torchrun's. A mute one is of a seat that is not its learner's first."""

    def __init__(
        self, place: TorchrunPlace, group: CollectiveGroup, line: Line, folder: str | None, *, mute: bool
    ) -> None:
        self.rank, self.learners, self._mute = place.rank, place.learners, mute
        self._group, self._line = group, line
        self.asked: Callable[[], bool] = lambda: False  # somebody in this process wants the run to end
        self._writer = Writer(Path(folder), lambda saved: _try_send(line, saved)) if folder else None
        self.progress: Progress | None = None

    def now(self) -> float:
        return time.monotonic()

    def spend(self, work: Computing | Serving) -> None:
        pass

    def reduce(self, buffer: Tensor) -> Reduction:
        self._line.called()
        return self._group.reduce(buffer)

    def broadcast(self, buffer: Tensor) -> None:
        self._line.called()
        self._group.broadcast(buffer)

    def meet(self, what: str, value: Any) -> list[Any]:
        return self._line.meet(what, value)

    def tell(self, message: Any) -> None:
        if isinstance(message, Progress):
            self.progress = message._replace(histogram=dict(message.histogram))
        elif not self._mute:
            self._line.send(message)
        elif isinstance(message, PeerClosed):  # its end, and what it counted
            self._line.send(replace(message, copies={}))

    def save(self, number: int, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        if not self._mute:
            assert self._writer is not None
            self._writer.write_after(number, name, tensors, notes)

    def stopping(self) -> bool:
        return self._line.stop or self.asked()


class TorchrunHandle(Handle):
    """A run of which this process is a learner: `wait` without a limit runs it, on the caller's thread."""

    def __init__(self, spec: RunSpec, place: TorchrunPlace) -> None:
        self._spec, self._place = spec, place
        self._done = threading.Event()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._port: TorchrunPort | None = None
        self._stop = False
        self._signal = 0
        self._watchdog: threading.Timer | None = None

    def wait(self, timeout: float | None = None) -> Outcome:
        if timeout is None and not self.done:
            self._run()
        elif not self._done.wait(timeout):
            raise TimeoutError(f"the run goes on after {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def stop(self) -> None:
        """Any learner's wish is enough: all agree on the step after which they leave."""
        self._stop = True

    def interrupt(self, signal: int) -> None:
        self._stop, self._signal = True, signal
        self._watchdog = threading.Timer(GRACE, self._give_up)
        self._watchdog.daemon = True
        self._watchdog.start()

    def _give_up(self) -> None:
        """Others do not come to the step on which all would agree."""
        if not self.done:
            sys.stderr.write(
                f"learner {self._place.rank} did not finish its step within {GRACE:.0f} s of the signal\n"
            )
            sys.stderr.flush()
            os._exit(128 + self._signal)

    def end(self, seconds: float) -> None:
        """It runs on the caller's thread: whoever can call this is not in it."""

    def add_learners(self, count: int) -> None:
        raise UsageError("all-reduce has fixed membership: no learners can be added")

    def change(self, sync: Sync) -> None:
        raise UsageError("all-reduce cannot change its dial in the middle; give a course")

    def statistics(self) -> m.Statistics:
        """Of the running process: its own steps."""
        if self._outcome is not None:
            return self._outcome.statistics
        shown = self._port.progress if self._port is not None else None
        if shown is None:
            raise RunError("the run has not begun")
        return m.Statistics(0, {}, {self._place.rank: shown.started}, {self._place.rank: shown.loss})

    # -- the run -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        server: RunServer | None = None
        line: Line | None = None
        try:
            store = next_store()
            if self._place.rank == 0:
                server = RunServer(self._spec, self._place)
                server.start()
                store.set("rank 0", server.address.text())
            line = Line(reach(self._place, Address.of(store.get("rank 0"))), self._place.rank)
            self._outcome = self._learn(store, line)
        except BaseException as error:
            self._error = error
        finally:
            if line is not None:
                line.close()
            if server is not None:
                server.join()
            if self._watchdog is not None:
                self._watchdog.cancel()
            outcome = self._outcome or getattr(self._error, "outcome", None)
            if outcome is not None:  # on the caller's thread: unpickling may import
                outcome.returned = unpickled(outcome.returned)
            self._done.set()

    def _learn(self, store: Any, line: Line) -> Outcome:
        try:
            arrived = self._arrive(line)
            with self._session(store, line, arrived) as session:
                return self._call(session, line)
        except PeerLost as error:
            raise self._blame(line, error) from None
        except (KeyboardInterrupt, Refusal):
            raise
        except BaseException as error:
            raise self._confess(line, error) from error
        finally:
            line.leave()

    def _arrive(self, line: Line) -> list[Arrival]:
        """All come with what they have; what one is refused, all are."""
        spec = self._spec
        device = spec.seat(self._place.rank).device
        kept = (
            (spec.storage.restored.version, spec.storage.restored.seal)
            if spec.storage.restored is not None
            else None
        )
        refused = str(spec.storage.refused) if spec.storage.refused is not None else ""
        mine = Arrival(socket.gethostname(), device, refused, kept)
        arrived: list[Arrival] = line.meet("the start", mine)
        if problem := difference(arrived):
            raise Refusal(problem)
        return arrived

    @contextlib.contextmanager
    def _session(self, store: Any, line: Line, arrived: list[Arrival]) -> Iterator[AllReduceSession]:
        """A learner's, or a seat's in the group of all processes."""
        spec, place, seats = self._spec, self._place, self._spec.group
        config = spec.seat(place.rank if seats == 1 else 0)
        if torch.device(config.device).type == "cuda":
            torch.cuda.set_device(config.device)
        group = line.join(store, place, arrived)
        self._port = TorchrunPort(place, group, line, spec.storage.folder, mute=seats > 1 and place.rank > 0)
        self._port.asked = lambda: self._stop
        if seats == 1:
            yield AllReduceSession(self._port, config, spec.storage.restored)
            return
        config = replace(config, reader=False)  # whose thread would draw when it likes
        moves = line.join(dist.PrefixStore("moves", store), place, arrived)
        join(Joined(MovesOf(moves), config.cut, config.plan.seed))
        try:
            yield GroupSession(self._port, config, spec.storage.restored, place.rank)
        finally:
            join(None)

    def _call(self, session: AllReduceSession, line: Line) -> Outcome:
        spec = self._spec
        session.seed()
        value = None
        part = "learner" if spec.group == 1 else "seat"
        title = title_of(f"{part} {self._place.rank}", spec.name)
        with session.until_stopped(), titled(title):
            value = spec.task.function(session, *map(_own, spec.task.arguments), **spec.task.keywords)
        session.close()
        signal = self._signal if session.stopped else 0
        line.send(RankLeft(*pickled(value), line.calls, session.steps, signal))
        outcome = line.end()
        return replace(outcome, tables=session.states(outcome.tables))

    def _blame(self, line: Line, broken: PeerLost) -> BaseException:
        failure = line.why(BLAME)
        if failure is None:
            failure = RunError(f"a collective failed in learner {self._place.rank}: {broken}")
        _try_send(line, RunFailure.of(failure))
        line.abort()
        return failure

    def _confess(self, line: Line, error: BaseException) -> BaseException:
        if error is line.failure:
            return error
        rank, text = self._place.rank, "".join(traceback.format_exception(error))
        if self._spec.group > 1:
            rank, text = 0, f"in seat {rank} of learner 0:\n{text}"
        _try_send(line, m.Raised(None, text))
        line.abort()
        return LearnerError(rank=rank, traceback=text)


def _try_send(line: Line, message: Any) -> None:
    try:
        line.send(message)
    except PeerLost:
        return


def _own(argument: Any) -> Any:
    """`train` does not change the caller's model: processes that it starts have their own, too."""
    if isinstance(argument, Training) and isinstance(argument.model, nn.Module):
        return replace(argument, model=copied(argument.model))
    return argument


class Torchrun(Engine):
    """The processes that torchrun has started, this one among them."""

    def __init__(self, place: TorchrunPlace) -> None:
        self.place = place

    def start(self, spec: RunSpec) -> TorchrunHandle:
        keep_freed_memory()
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        return TorchrunHandle(spec, self.place)

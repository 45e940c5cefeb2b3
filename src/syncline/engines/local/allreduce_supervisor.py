"""The supervisor of an all-reduce run: starts its learners, keeps their record, and ends them all when one is gone.

Nothing of a step passes here: learners reduce among themselves.
"""

from __future__ import annotations

import math
import os
import time
from functools import partial
from typing import Any

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.collectives import wants_nccl
from syncline.engines.local.allreduce_learner import (
    CALLS,
    WAITS,
    AllReduceLearnerSpec,
    Broken,
    SaveCopy,
    board_bytes,
    read_board,
    run_peer,
)
from syncline.engines.local.processes import Process
from syncline.engines.local.shared_memory import Region
from syncline.engines.local.shared_pickle import Parcel
from syncline.engines.local.supervisor_base import LOOK, HangDetection, RunSupervisor
from syncline.engines.recorder import learner_error, peer_record
from syncline.engines.run import RunSpec
from syncline.errors import RunError, UsageError
from syncline.protocols.lifecycle import LastCopy, alone
from syncline.protocols.staleness import StalenessClock
from syncline.roles.allreduce_coordinator import Unsaved, apart, early

GRACE = 10.0  # seconds that learners get to finish their step after a stop
BLAME = 2.0  # seconds that a broken collective waits for whoever broke it


class AllReduceSupervisor(RunSupervisor):
    """An all-reduce run."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.recorder, self._keeper = peer_record(
            spec,
            now=self.now,
            evaluate=self._evaluate,
            stop=self._stop,
            reply=lambda rank, message: self.learners[rank].channel.post(message),
            fail=self.fail,
        )
        self.learners: dict[int, Process] = {}  # by rank
        self._meeting = os.memfd_create("syncline-meeting", os.MFD_CLOEXEC)
        self._stop_word = Region(8)
        restored = spec.storage.restored
        accounts = [state.account for state in restored.tables.values()] if restored is not None else []
        before = [sigma for account in accounts for sigma in account.histogram or {}]
        nbytes = board_bytes(max([spec.plan.delay, *before]))
        self._boards = [Region(nbytes) for _ in range(spec.plan.learners)]
        self._deadline: float | None = None
        self._finishing: set[int] = set()  # ranks that a stop has taken out of their loops
        self._broken: tuple[float, int, str] | None = None  # (when, rank, what it said)
        self._last_copy: LastCopy | None = None  # once the run has failed
        self._hanging = HangDetection(self, "the others wait for it", "ends such a learner, and the run")

    def add_learners(self, count: int) -> None:
        raise UsageError("all-reduce has fixed membership: no learners can be added; use topology='servers'")

    def change(self, sync: Sync) -> None:
        raise UsageError(
            "all-reduce cannot change its dial in the middle; give a course, such as 'hardsync until 1 then delayed:1'"
        )

    # -- the run -----------------------------------------------------------------------------------------

    def _start(self, task: Parcel) -> None:
        spec = self.spec
        meeting = f"/proc/{os.getpid()}/fd/{self._meeting}"
        nccl = wants_nccl(spec.devices)
        restored = spec.storage.restored
        resume = (restored.path, restored.name) if restored is not None else None
        for rank in range(spec.plan.learners):
            common = meeting, self._boards[rank], self._stop_word, nccl, spec.storage.folder, resume
            run = partial(run_peer, spec=AllReduceLearnerSpec(spec.seat(rank), *common))
            self.learners[rank] = self._processes.fork("learner", rank, rank, run, None, self._threads())
            self.learners[rank].channel.post(task)

    def _over(self) -> bool:
        returned = all(process.state == "returned" for process in self.learners.values())
        return returned and self.recorder.complete() and not self._keeper.cutting

    def _stop(self) -> None:
        """Learners agree on the step after which they leave."""
        self._stop_word.words[0] = 1
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE

    # -- processes ---------------------------------------------------------------------------------------

    def _heard(self, process: Process, message: Any) -> None:
        if isinstance(message, m.Returned):
            process.state = "returned"
            self.recorder.returned(process.rank, message)
        elif isinstance(message, m.Raised):
            process.state = "raised"
            self.recorder.event("raised", process.rank, kind="raised")
            self.fail(learner_error(process.rank, message.error, message.traceback))
        elif isinstance(message, Unsaved):
            if self._last_copy is not None:
                self._last_copy.refused(process.rank, whole=message.whole)
                self._processes.kill(process)  # the collectives of the others break: they can be asked then
        elif isinstance(message, Broken):
            process.state = "broken"
            self._broken = self._broken or (time.monotonic(), process.rank, message.text)
            self._urgent = True
        elif isinstance(message, m.LeftLoop):
            (self._finishing.discard if message.again else self._finishing.add)(process.rank)
        else:
            self._keeper.hear(process.rank, message)

    def _ended(self, process: Process, how: str) -> None:
        process.state = "lost"
        if process.role == "learner":
            what = f"lost: its process (pid {process.pid}) ended with {how}"
            self.recorder.event(what, process.rank, kind="lost", pid=process.pid)
        self.fail(alone(f"{process.role} {process.rank} (pid {process.pid}) ended with {how}"))

    def _look(self, now: float) -> None:
        self._check_early()
        if self._broken is not None and now - self._broken[0] > BLAME:
            _, rank, text = self._broken
            self.fail(RunError(f"a collective failed in learner {rank}: {text}"))
        running = [rank for rank, process in self.learners.items() if process.state == "running"]
        late = [rank for rank in running if rank not in self._finishing]
        if self._deadline is not None and now > self._deadline and late:
            ranks = ", ".join(map(str, late))
            self.fail(
                RunError(f"learners {ranks} did not finish their step within {GRACE:.0f} s of the stop")
            )
        progress = {rank: self._boards[rank].words[CALLS] for rank in running}
        waiting = {rank for rank in running if self._boards[rank].words[WAITS]}
        self._hanging.look(now, progress, waiting | self._keeper.waiting().keys(), self.learners)

    def _check_early(self) -> None:
        """Somebody returned, or waits in a meeting, and another needs it for a collective."""
        calls = {rank: self._boards[rank].words[CALLS] for rank in self.learners}
        for rank, process in self.learners.items():
            other = max(calls, key=lambda each: calls[each])
            if process.state == "returned" and calls[other] > calls[rank]:
                self.fail(early(rank, self._keeper.closed[rank].steps, other, "a further step"))
        meeting = self._keeper.waiting()
        for rank, meet in meeting.items():
            for other, count in calls.items():
                if other not in meeting and count > calls[rank]:
                    self.fail(apart(rank, meet.what, other))

    # -- the last checkpoint of a run that has failed ------------------------------------------------------

    def _save_failed(self) -> None:
        """Ask learners for their copy, one after the other; those that still compute leave with a checkpoint of all."""
        restored, folder = self.spec.storage.restored, self.spec.storage.folder
        before = restored.version if restored is not None else 0
        if folder is None or all(read_board(region.words).version <= before for region in self._boards):
            return
        self._stop_word.words[0] = 1
        known = len(self.outcome.events)
        copy = self._last_copy = LastCopy(time.monotonic(), GRACE)
        while not self._at_once and copy.waits(time.monotonic(), begun=self._keeper.cutting):
            learners = self.learners.items()
            free = {rank for rank, each in learners if each.state in ("raised", "broken") and not each.reaped}
            saved = any(event.kind.startswith("checkpoint") for event in self.outcome.events[known:])
            for ask in copy.look(free, saved):
                self.learners[ask.rank].channel.post(SaveCopy())
            # a learner that has returned still writes, and stays until it is told to end
            returned = "lost" if self._keeper.cutting else "returned"
            if all(each.state in ("lost", returned) or each.reaped for _, each in learners):
                return
            self._processes.work(LOOK)

    # -- statistics --------------------------------------------------------------------------------------

    def _questioned(self, number: int) -> None:
        """As the learners' boards show it; at the end exact."""
        shown = [read_board(region.words) for region in self._boards]
        first = shown[0]
        clock = StalenessClock()
        clock.histogram.update(first.histogram)
        waits = [rank for rank in self.learners if self._boards[rank].words[WAITS]]
        waiting = dict.fromkeys(waits, first.version)
        missing = [rank for rank in self.learners if rank not in waiting] if waiting else []
        table = m.TableStatistics(
            first.version, first.gradients, 0, first.examples, clock.account(), waiting, missing, 0
        )
        steps = {rank: progress.started for rank, progress in enumerate(shown)}
        said = [(rank, each.loss) for rank, each in enumerate(shown) if each.started]
        losses = {rank: loss for rank, loss in said if not math.isnan(loss)}
        tables = {0: table} if self._keeper.layouts else {}
        self._answer(self._complete(m.Statistics(number, tables, steps, losses), waiting))

    def _complete(self, statistics: m.Statistics, waiting: dict[int, int]) -> m.Statistics:
        return self._with_processes(
            statistics,
            lambda process: "waits for the others" if process.rank in waiting else "computing",
        )

    # -- end ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.outcome.statistics = self._complete(self.outcome.statistics, {})
        if self.error is None:
            for process in self.learners.values():
                process.channel.post(None)  # they may leave
        self._close()
        os.close(self._meeting)
        for region in (self._stop_word, *self._boards):
            region.release()

"""Keeps the record of an all-reduce run: what its learners report, put together for the recorder; their parts of checkpoints.

Also where they meet: layouts are compared, means are taken. A role that engines host where it suits them (the supervisor, rank 0
under torchrun, the simulated world); nothing here is on a step's path. All learners report the same epochs and the same end.
Not responsible for when checkpoints are cut, nor for their files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.errors import RunError
from syncline.protocols.epoch_positions import Standing
from syncline.protocols.sequence import Account
from syncline.protocols.staleness import Staleness
from syncline.roles.checkpoint_manifest import (
    LEARNERS,
    PipelineState,
    learner_tensors,
    manifest,
    pipelines_json,
)
from syncline.roles.counters import joint_buffers
from syncline.table.checkpoints import Written
from syncline.table.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What all learners have alike, without the tensors."""

    files: list[str]  # that the first learner writes
    accounts: dict[int, Account]
    examples: dict[int, int]
    optimizers: dict[int, str]
    pipelines: dict[int, PipelineState]
    loaders: dict[int, m.OpenLoader]
    standings: dict[int, Standing]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCut:
    """One learner's part of a checkpoint; `joint` from learner 0 only, or of a run that has failed from the one that saves it."""

    number: int
    personal: m.Personal
    losses: tuple[float, int]  # of the epoch so far: (sum over examples, examples)
    flights: dict[int, list[tuple[float, int]]] = field(default_factory=dict)  # the same of those, by table
    joint: Joint | None = None
    failed: bool = False  # no other learner has a part


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A learner was asked to save a run that has failed, and has nothing to save; `whole`: others have nothing either."""

    whole: bool


@dataclass(frozen=True, slots=True)
class GatheredCut:
    """What has come of a checkpoint; all of it but the learners' own file when it is kept."""

    number: int
    size: int  # learners of the run
    parts: dict[int, PeerCut] = field(default_factory=dict)  # by rank
    saved: dict[str, m.Saved] = field(default_factory=dict)

    @property
    def joint(self) -> Joint:
        return next(part.joint for part in self.parts.values() if part.joint is not None)

    @property
    def files(self) -> list[Written]:
        found = (self.saved[name].written for name in self.joint.files)
        return [written for written in found if written is not None]

    @property
    def problem(self) -> str:
        return next((each.problem for each in self.saved.values() if each.problem), "")

    def learners(self) -> tuple[str, dict[str, Tensor]]:
        """The file of random states and buffers."""
        random = {rank: part.personal.random for rank, part in self.parts.items()}
        buffers: dict[tuple[int, int], Sequence[Tensor]] = {
            (table, rank): values
            for rank, part in self.parts.items()
            for table, values in part.personal.buffers.items()
        }
        return LEARNERS, learner_tensors(random, buffers)

    def manifest(
        self, *, seed: int, sync: str, layouts: Mapping[int, Any], history: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        joint = self.joint
        epoch = joint.standings[0].done if 0 in joint.standings else 0
        counts = m.Counts(
            joint.examples,
            {epoch: {rank: list(part.losses) for rank, part in self.parts.items()}},
            {rank: part.personal.steps for rank, part in self.parts.items()},
        )
        flights = {rank: part.flights for rank, part in self.parts.items()}
        found = manifest(
            m.Cut(self.number, joint.files, joint.accounts, joint.standings, counts),
            seed=seed,
            sync=sync,
            chosen=[],
            learners=self.size,
            tables={table: (layouts[table], name) for table, name in joint.optimizers.items()},
            loaders={number: (loader, self.size) for number, loader in joint.loaders.items()},
            history=history,
        )
        return {**found, "pipelines": pipelines_json(joint.pipelines, flights)}


def own_losses(
    losses: Mapping[int, Mapping[int, Sequence[float]]], rank: int, learners: int
) -> tuple[float, int]:
    """Of a rank in a run that goes on; the first takes over those of ranks that there are no more."""
    by_rank = [pair for epoch in losses.values() for pair in epoch.items()]
    mine = [each for other, each in by_rank if other == rank or (rank == 0 and other >= learners)]
    return sum(loss for loss, _ in mine), int(sum(count for _, count in mine))


@dataclass(frozen=True, slots=True)
class Meet:
    """A learner's contribution to its next meeting, after so many collectives; answered by everybody's, by rank."""

    what: str
    value: Any
    calls: int = 0


@dataclass(frozen=True, slots=True)
class PeerTable:
    """Learner 0 has opened a table."""

    table: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Copy:
    """One learner's copy of a table; `segments`, and at the end `others`, from learner 0 only: they are the same everywhere."""

    version: int
    segments: list[Tensor] | None
    buffers: list[Tensor]
    others: list[Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEpoch:
    """The gradient that ended an epoch was applied."""

    epoch: int
    version: int
    examples: int
    loss: float  # sum over examples
    count: int  # of examples in it
    copies: dict[int, Copy] = field(default_factory=dict)  # by table, where snapshots are wanted


@dataclass(frozen=True, slots=True)
class PeerAccount:
    """What one learner counted of one table."""

    version: int
    gradients: int
    examples: int
    staleness: Staleness
    checksum: int  # of all parameters' bits


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """Its function is over, and everything in flight is applied."""

    steps: int  # of all its tables
    loss: float
    accounts: dict[int, PeerAccount]
    copies: dict[int, Copy]


@dataclass(frozen=True, slots=True)
class Deeper:
    """The vote of `delayed:auto<=k` has changed the depth."""

    table: int
    version: int
    before: int
    depth: int
    share: float  # of the time that was spent waiting


class AllReduceCoordinator:
    """One run's reports."""

    def __init__(
        self,
        learners: int,
        processes: int,
        *,
        emit: Callable[[Any], None],
        event: Callable[..., None],
        reply: Callable[[int, Any], None],
        fail: Callable[[BaseException], None],
        keep: Callable[[GatheredCut], None],
    ) -> None:
        self._learners, self._processes = learners, processes  # more of them where a learner has seats
        self._emit, self._event, self._reply, self._fail, self._keep = emit, event, reply, fail, keep
        self._cuts: dict[int, GatheredCut] = {}  # checkpoints that are not complete, by number
        self.layouts: dict[int, Layout] = {}
        self._met = [0] * processes  # meetings of each
        self._meetings: dict[int, dict[int, Meet]] = {}
        self._epochs: dict[int, dict[int, PeerEpoch]] = {}
        self.closed: dict[int, PeerClosed] = {}

    def hear(self, rank: int, message: Any) -> None:
        if isinstance(message, Meet):
            self._meet(rank, message)
        elif isinstance(message, m.Log):
            self._emit((rank, message))
        elif isinstance(message, PeerTable):
            self.layouts[message.table] = message.layout
        elif isinstance(message, PeerEpoch):
            self._epoch(rank, message)
        elif isinstance(message, PeerClosed):
            self._close(rank, message)
        elif isinstance(message, PeerCut | m.Saved):
            self._cut(rank, message)
        elif isinstance(message, Deeper):
            what = (
                f"delay {message.before} → {message.depth}: {message.share:.0%} of the time was spent waiting"
            )
            self._event(what, kind="delay", version=message.version, table=message.table, delay=message.depth)
        else:
            self._emit(message)

    @property
    def cutting(self) -> bool:
        """A checkpoint is being written."""
        return bool(self._cuts)

    def _cut(self, rank: int, message: PeerCut | m.Saved) -> None:
        """One more part of a checkpoint; it may have been the last."""
        cut = self._cuts.setdefault(message.number, GatheredCut(message.number, self._learners))
        if isinstance(message, PeerCut):
            cut.parts[rank] = message
        else:
            cut.saved[message.name] = message
        whole = len(cut.parts) == self._learners or any(part.failed for part in cut.parts.values())
        if whole and not set(cut.joint.files) - cut.saved.keys():
            del self._cuts[message.number]
            self._keep(cut)

    # -- meetings ----------------------------------------------------------------------------------------

    def _meet(self, rank: int, message: Meet) -> None:
        number = self._met[rank]
        self._met[rank] += 1
        meeting = self._meetings.setdefault(number, {})
        meeting[rank] = message
        other = next((each for each in meeting if meeting[each].what != message.what), None)
        if other is not None:
            self._fail(
                RunError(
                    f"learner {rank} is at {message.what} while learner {other} is at {meeting[other].what}: under "
                    "all-reduce all learners must do the same in the same order"
                )
            )
        elif len(meeting) == self._processes:
            del self._meetings[number]
            values = [meeting[each].value for each in range(self._processes)]
            for each in range(self._processes):
                self._reply(each, values)
        else:
            self._check_absent()

    def waiting(self) -> dict[int, Meet]:
        """Who waits in which meeting."""
        return {rank: meet for meeting in self._meetings.values() for rank, meet in meeting.items()}

    def _check_absent(self) -> None:
        for meeting in self._meetings.values():
            gone = [rank for rank in self.closed if rank not in meeting]
            if gone:
                rank, there = gone[0], min(meeting)
                self._fail(early(rank, self.closed[rank].steps, there, meeting[there].what))

    # -- reports -----------------------------------------------------------------------------------------

    def _epoch(self, rank: int, report: PeerEpoch) -> None:
        reports = self._epochs.setdefault(report.epoch, {})
        reports[rank] = report
        if len(reports) < self._learners:
            return
        del self._epochs[report.epoch]
        self._emit_copies(f"epoch:{report.epoch}", [reports[each].copies for each in range(self._learners)])
        first = reports[0]
        count = sum(each.count for each in reports.values())
        total = sum(each.loss for each in reports.values())
        losses = {each: reports[each].loss / reports[each].count for each in reports if reports[each].count}
        mean = total / count if count else float("nan")
        self._emit(
            m.EpochEnd(
                0,
                first.epoch,
                first.version,
                first.examples,
                mean,
                dict(sorted(losses.items())),
                len(first.copies),
                first.epoch + 1,
            )
        )

    def _close(self, rank: int, report: PeerClosed) -> None:
        self.closed[rank] = report
        self._check_absent()
        if len(self.closed) < self._processes:
            return
        ranks = range(self._learners)
        self._emit_copies("final", [self.closed[each].copies for each in ranks])
        tables = {
            table: m.TableStatistics(
                account.version, account.gradients, 0, account.examples, account.staleness, {}, [], 0
            )
            for table, account in self.closed[0].accounts.items()
        }
        steps = {each: self.closed[each].steps for each in ranks}
        losses = {each: loss for each in ranks if (loss := self.closed[each].loss) == loss}
        self._emit(m.Finished(m.Statistics(-1, tables, steps, losses)))
        if problem := _difference(self.closed):
            self._fail(RunError(problem))

    def _emit_copies(self, tag: str, copies: list[dict[int, Copy]]) -> None:
        for table, first in copies[0].items():
            assert first.segments is not None
            buffers = joint_buffers([each[table].buffers for each in copies if table in each])
            part = m.WeightsPart(tag, table, 0, first.version, first.segments, buffers, others=first.others)
            self._emit(part)


def _difference(closed: dict[int, PeerClosed]) -> str | None:
    """Whether the copies are still one."""
    for table, first in closed[0].accounts.items():
        for rank, report in sorted(closed.items()):
            other = report.accounts.get(table)
            if other is None or (other.version, other.checksum) != (first.version, first.checksum):
                return (
                    f"the copies of table {table} differ at the end: learner {rank} is at version "
                    f"{other.version if other else None}, learner 0 at {first.version}, and their bits are not the same. "
                    "Under all-reduce all learners must change gradients and parameters in the same way"
                )
    return None


def apart(rank: int, what: str, other: int) -> RunError:
    """Somebody waits in a meeting to which another does not come."""
    return RunError(
        f"learner {rank} is at {what} while learner {other} is at a further collective, such as a step: under all-reduce "
        "all learners must do the same in the same order"
    )


def left_out(rank: int, table: int, steps: int, others: int) -> RunError:
    """Somebody did not take a step that others took."""
    return RunError(
        f"learner {rank} has taken {steps} steps of table {table} where {others} other learners have taken {steps + 1}: it "
        f"left out the step after backward {steps + 1}. Layer-wise, gradients are averaged while backward runs, so all "
        "learners must step after the same backwards: decide together (session.mean), or use allreduce:blocking"
    )


def early(rank: int, steps: int, other: int, what: str) -> RunError:
    """Somebody left while the others go on."""
    return RunError(
        f"learner {rank} returned after {steps} steps while learner {other} is at {what}: under all-reduce all "
        "learners must take the same number of steps (session.loader sees to that)"
    )

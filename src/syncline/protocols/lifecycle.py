"""A run's life, decided: who is started, replaced, given up and ended; when it goes back, begins anew, fails, is finished.

Events in, decisions out, in the order in which they are to be carried out; time is passed in. Over servers learners come and
go (M8) and shards come back (S7); among equals nobody can be missed. Not responsible for noticing or carrying out anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.errors import LostError, UsageError

PATIENCE = 60.0  # seconds
MOST = 3  # losses in a row that lead nowhere: of shards without a checkpoint, of a rank without a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens when learners raise, die or hang."""

    on_error: str = "raise"  # or "continue": an exception ends only its learner
    replace: bool = False  # lost learners are replaced
    patience: float | None = PATIENCE  # seconds without a word until a learner is said to hang
    kill_hung: bool = False

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "continue"):
            raise UsageError(f'on_error is "raise" or "continue", got {self.on_error!r}')
        number = isinstance(self.patience, int | float) and not isinstance(self.patience, bool)
        if self.patience is not None and not (number and self.patience > 0):
            raise UsageError(f"patience is a number of seconds > 0, or None, got {self.patience!r}")
        if self.kill_hung and self.patience is None:
            raise UsageError("kill_hung=True needs patience=, the seconds after which a learner hangs")


@dataclass(frozen=True, slots=True)
class Grace:
    """Seconds after a stop."""

    cut: float  # until a last checkpoint has begun
    step: float  # until learners have finished their step
    save: float = 10.0  # until the last checkpoint of a run that has failed has begun


# -- decisions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartLearner:
    """One joins a run that goes on."""

    learner: int  # an id that was never given
    rank: int


@dataclass(frozen=True, slots=True)
class BeginAnew:
    """All of these (id to rank) begin together; the shards stay."""

    learners: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Leave:
    """A learner is gone: nobody waits for it any more."""

    learner: int
    lost: bool


@dataclass(frozen=True, slots=True)
class GoBack:
    """New shards, at the last checkpoint or at the start: those `ended` end with the old ones, `learners` begin, others rejoin."""

    lost: str  # why, in words
    start: bool  # there is no checkpoint yet
    ended: Sequence[int]
    learners: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class PrepareStop:
    """A last checkpoint, if it is soon there; then learners stop."""


@dataclass(frozen=True, slots=True)
class StopLearners:
    """They leave after their step."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process in the middle; its loss will be noticed."""

    number: int  # of a learner, or a shard
    why: str


@dataclass(frozen=True, slots=True)
class Finish:
    """All learners have left: shards give their last weights, and write a last checkpoint."""


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Write a checkpoint of a run that has failed, from the shards that live; then end it."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The run ends with this."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class StartEvaluator:
    """Start a process that evaluates snapshots, beginning with the oldest one that waits."""


@dataclass(frozen=True, slots=True)
class SkipEvaluation:
    """Give up the evaluation of an epoch: its record has no metrics."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Say:
    """An event for the record."""

    what: str
    rank: int | None
    kind: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WarnLost:
    """A learner is gone and the run goes on: with so many others, or as `then` says."""

    rank: int
    how: str
    others: int
    then: str = ""


@dataclass(frozen=True, slots=True)
class Warn:
    """A warning of what an event has said."""

    text: str


Decision = (
    StartLearner
    | BeginAnew
    | Leave
    | GoBack
    | PrepareStop
    | StopLearners
    | Kill
    | Finish
    | SaveFailed
    | Fail
    | StartEvaluator
    | SkipEvaluation
    | Say
    | WarnLost
    | Warn
)


# -- over servers ------------------------------------------------------------------------------------------


class Lifecycle:
    """Of a run over servers. Learners have ids, which are never given twice, and ranks.

    `recovers`: checkpoints are written, so that lost shards come back; `saved`: there is one to begin with. `rejoins`: learners
    outlive their shards. `hold`: a part of the table is in the one learner (M16). `ranks`, `last_rank`, `returned` and `losses` are those of a run that goes on.
    """

    def __init__(
        self,
        faults: Faults,
        learners: int,
        *,
        recovers: bool,
        saved: bool = False,
        rejoins: bool = True,
        hold: bool = False,
        grace: Grace | None = None,
        ranks: Iterable[int] | None = None,
        last_rank: int = -1,
        returned: Iterable[int] = (),
        losses: Mapping[int, int] | None = None,
    ) -> None:
        self._faults, self._learners, self._grace = faults, learners, grace
        self._recovers, self._saved, self.rejoins, self._hold = recovers, saved, rejoins, hold
        self._given = 0  # ids
        self.last_rank = last_rank
        self.live: dict[int, int] = {}  # id -> rank
        self._returned = set(returned)  # ranks, since all began
        self.losses = Counter(losses or {})  # rank -> losses in a row without a step
        self._shard_losses = 0  # since the last checkpoint
        self._asked = False
        self.stopping = False
        self._failed = False
        self._deadline: float | None = None
        self._finishing: set[int] = set()  # learners that a stop has taken out of their loops
        self._cut_off: set[int] = set()  # learners that a stop has ended
        self._new(range(learners) if ranks is None else ranks)

    def _new(self, ranks: Iterable[int]) -> dict[int, int]:
        found = {self._given + 1 + index: rank for index, rank in enumerate(ranks)}
        self._given += len(found)
        self.live.update(found)
        self.last_rank = max(self.last_rank, *found.values()) if found else self.last_rank
        return found

    # -- learners ----------------------------------------------------------------------------------------

    def returned(self, learner: int, *, unaware: bool = False) -> list[Decision]:
        """Its function is over. `unaware`: it has never met the shards that there are now."""
        if (rank := self._take(learner)) is None:
            return []
        self._returned.add(rank)
        found: list[Decision] = [Leave(learner, lost=False)]
        if unaware and not self.live and not self.stopping:
            found += self._begin_anew()
        return found + self._finish()

    def raised(self, learner: int, error: BaseException, *, unaware: bool = False) -> list[Decision]:
        if self._faults.on_error == "raise":
            return self.fail(error) if learner in self.live else []
        if (rank := self._take(learner)) is None:
            return []
        found: list[Decision] = [
            Say(f"raised: {error}", rank, "raised", {"learner": learner}),
            Leave(learner, lost=True),
            *self._repeat(unaware),
        ]
        if self._all_lost:
            return found + self.fail(error)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        how = f"raised {lines[-1] if lines else ''}"  # what it says, without where
        return [*found, WarnLost(rank, how, len(self.live)), *self._finish()]

    def lost(
        self,
        learner: int,
        why: str,
        *,
        stepped: bool,
        unaware: bool = False,
        details: Mapping[str, Any] | None = None,
        now: float = 0.0,
    ) -> list[Decision]:
        """It died. `stepped`: not before it had made a step."""
        if (rank := self._take(learner)) is None:
            return []
        if learner in self._cut_off:  # by the stop: no loss
            return [Leave(learner, lost=True), *self._finish()]
        what = f"lost: {why}"
        found: list[Decision] = [
            Say(what, rank, "lost", {"learner": learner, **(details or {})}),
            Leave(learner, lost=True),
            *(self._repeat(unaware) if not self._hold else []),
        ]
        if self._hold:
            return found + self.shard_lost(f"learner {rank} is lost with its part of the table ({why})", now)
        if self._faults.replace and not self.stopping:
            self.losses[rank] = 0 if stepped else self.losses[rank] + 1
            if self.losses[rank] < MOST:
                ((new, _),) = self._new([rank]).items()
                then = WarnLost(rank, what, len(self.live), "another takes its place")
                return [*found, Say("replaced", rank, "replaced"), StartLearner(new, rank), then]
            what = f"given up: {self.losses[rank]} processes in a row were lost before their first step"
            found.append(Say(what, rank, "given up"))
        if self._all_lost:
            return found + self.fail(LostError(f"all learners are lost, the last was rank {rank}: {why}"))
        return [*found, WarnLost(rank, what, len(self.live)), *self._finish()]

    def add(self, count: int) -> list[Decision]:
        """More are asked for."""
        if self._failed:
            return []
        if self._asked or self.stopping or not self.live:
            who = f"{count} learners" if count > 1 else "a learner"
            return [Say(f"{who} not added: the run is ending", None, "refused")]
        found: list[Decision] = []
        for _ in range(count):
            ((learner, rank),) = self._new([self.last_rank + 1]).items()
            found += [Say("joined", rank, "joined"), StartLearner(learner, rank)]
        return found

    def _take(self, learner: int) -> int | None:
        """The rank of one that lived until now."""
        return None if self._failed else self.live.pop(learner, None)

    @property
    def _all_lost(self) -> bool:
        return not self.live and not self._returned and not self.stopping

    def _repeat(self, unaware: bool) -> list[Decision]:
        """The last one is lost, and what others had made before they returned: nobody else will make it again."""
        alone = not self.live and not self.stopping
        return self._begin_anew() if unaware and alone and self._returned and not self._faults.replace else []

    def _begin_anew(self) -> list[Decision]:
        """Nobody is left who knows that updates were lost: they are made again."""
        what = "learners begin anew: nobody was left to repeat what was lost"
        self._returned.clear()
        return [Say(what, None, "begun anew"), BeginAnew(self._new(range(self._learners)))]

    def _finish(self) -> list[Decision]:
        return [] if self.live else [Finish()]

    # -- shards ------------------------------------------------------------------------------------------

    def checkpointed(self) -> None:
        """There is one to go back to."""
        self._saved = True
        self._shard_losses = 0

    def shard_lost(
        self, lost: str, now: float = 0.0, details: Mapping[str, Any] | None = None
    ) -> list[Decision]:
        """All shards go back together; where there is no checkpoint yet, all begins as it began."""
        if self._failed:
            return []
        said = Say(lost, None, "shard lost", details or {})
        self._shard_losses += 1
        if not self._recovers:
            instead = "there is no checkpoint to go back to: give run_dir= and checkpoint_every="
            return [said, *self.fail(LostError(f"{lost}, and {instead}"))]
        if self._shard_losses > MOST:
            often = f"{self._shard_losses} times without a checkpoint in between; given up"
            return [said, *self.fail(LostError(f"{lost}, {often}"))]
        start = not self._saved
        ended = dict(self.live) if start or not self.rejoins else {}
        begin = set(ended.values())
        if start or not self.live:
            begin |= set(range(self._learners))
            self._returned.clear()
        for learner in ended:
            del self.live[learner]
        found: list[Decision] = [said, GoBack(lost, start, tuple(ended), self._new(sorted(begin)))]
        # a stop that was under way is not forgotten
        if self._grace is not None and (self._asked or self.stopping):
            self._deadline = now + (self._grace.step if self.stopping else self._grace.cut)
        return [*found, PrepareStop()] if self._asked and not self.stopping else found

    # -- the end -----------------------------------------------------------------------------------------

    def ask_stop(self, now: float) -> list[Decision]:
        """The user, a callback or a script wants the run to end."""
        if self._failed:
            return []
        if not self._asked and not self.stopping and self._grace is not None:
            self._deadline = now + self._grace.cut
        self._asked = True
        return [PrepareStop()]

    def stop(self, now: float) -> list[Decision]:
        """The last checkpoint has begun, or none is needed."""
        if self._failed or self.stopping:
            return []
        self.stopping = True
        self._deadline = now + self._grace.step if self._grace is not None else None
        return [StopLearners()]

    def tick(self, now: float) -> list[Decision]:
        """Time has passed."""
        if self._failed or self._deadline is None or now <= self._deadline or self._grace is None:
            return []
        if not self.stopping:
            return self.stop(now)
        late = self.live.keys() - self._finishing - self._cut_off
        self._cut_off |= late
        why = f"did not finish its step within {self._grace.step:.0f} s of the stop"
        return [Kill(learner, why) for learner in sorted(late)]

    def left_loop(self, learner: int, *, again: bool) -> None:
        """Let a learner finish its function, in its own time, once a stop has ended its loop; not one that loops `again`."""
        (self._finishing.discard if again else self._finishing.add)(learner)

    def fail(self, error: BaseException) -> list[Decision]:
        """Nothing more is decided."""
        if self._failed:
            return []
        self._failed = True
        return [Fail(error)]

    def save_failed(self, now: float) -> list[Decision]:
        """Decide what becomes of the state of a run that ends with an error while all its shards live.

        Nothing else is decided any more. A table of which the learner holds a part (M16) cannot be saved without it.
        """
        self._failed = True
        if not self._recovers or self._hold or self._grace is None:
            return []
        self._deadline = now + self._grace.save
        return [SaveFailed()]

    def waits_to_save(self, now: float, *, begun: bool) -> bool:
        """Return whether a failed run still waits for its last checkpoint: until it is written, if it begins in time."""
        return begun or (self._deadline is not None and now <= self._deadline)


# -- the evaluator -----------------------------------------------------------------------------------------


class EvaluatorLosses:
    """Decide what follows when the evaluator's process ends: it holds nothing that another process cannot evaluate again."""

    def __init__(self) -> None:
        self._losses = 0  # in a row, without an evaluation

    def evaluated(self) -> None:
        """Count no earlier loss any more: an evaluation was finished."""
        self._losses = 0

    def lost(self, why: str, pid: int, waiting: Sequence[tuple[int, int | None]]) -> list[Decision]:
        """Replace a process that ended, at once where evaluations wait: (epoch, its version), the one under way first.

        Where MOST processes in a row were lost before they finished one, give up the evaluation under way.
        """
        what = f"the evaluator is lost: its process (pid {pid}) ended with {why}"
        said = Say(what, None, "evaluator lost", {"pid": pid})
        if not waiting:
            return [said]
        self._losses += 1
        if self._losses < MOST:
            return [said, StartEvaluator()]
        epoch, version = waiting[0]
        which = f"version {version}" if version is not None else f"epoch {epoch + 1}"
        skipped = (
            f"{which} is not evaluated: {self._losses} evaluators in a row ended before they finished, the last (pid {pid}) with "
            f"{why}; its record has no metrics, and the run goes on"
        )
        again = [StartEvaluator()] if len(waiting) > 1 else []
        return [said, SkipEvaluation(epoch), Say(skipped, None, "not evaluated"), Warn(skipped), *again]


# -- among equals ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskCopy:
    """Have this learner save its copy of the state."""

    rank: int


class LastCopy:
    """Decide which learner saves a run among equals that has failed; all have the same copy, but few can be asked.

    A learner is free when its own code has raised, or its collective has broken. The others wait in collectives.
    """

    def __init__(self, now: float, seconds: float) -> None:
        self._deadline = now + seconds
        self._tried: set[int] = set()
        self._asked: int | None = None
        self._over = False

    def look(self, free: Collection[int], saved: bool) -> list[AskCopy]:
        """Ask the next of the learners that are free; one that is not any more has ended without an answer."""
        self._over |= saved
        if self._asked is not None and self._asked not in free:
            self._asked = None
        left = sorted(set(free) - self._tried)
        if self._over or self._asked is not None or not left:
            return []
        self._asked = left[0]
        self._tried.add(left[0])
        return [AskCopy(left[0])]

    def refused(self, rank: int, *, whole: bool) -> None:
        """Note that a learner has nothing to save; `whole`: nor has any other."""
        self._asked = None if self._asked == rank else self._asked
        self._over |= whole

    def waits(self, now: float, *, begun: bool) -> bool:
        """Return whether the run still waits for its last checkpoint."""
        return not self._over and (begun or now <= self._deadline)


def alone(what: str) -> LostError:
    """Whoever is lost among equals ends the run for all."""
    return LostError(f"{what}; under all-reduce the others cannot go on without it")


# -- who hangs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hangs:
    """What follows when a process was not heard of for `seconds`: it is named, and ended where the user wants that."""

    seconds: float
    kill: bool
    others: str = "the others may wait for it"  # what it means
    end: str = "ends such a learner"  # what kill_hung does

    def decide(
        self, number: int, name: str, rank: int | None, silence: float, pid: int | None = None
    ) -> list[Decision]:
        """`rank`: of a learner."""
        process = f" (pid {pid})" if pid is not None else ""
        what = f"hangs: not heard of for {silence:.1f} s{process}"
        details = {"pid": pid} if pid is not None else {}
        said = Say(what if rank is not None else f"{name} {what}", rank, "hangs", details)
        if self.kill:
            return [said, Kill(number, f"patience of {self.seconds:g} s is over")]
        instead = f"It is left alone: kill_hung=True {self.end}, patience= sets the time"
        return [said, Warn(f"{name} {what}; {self.others}. {instead}")]


class Watchdog:
    """Looks at everybody's progress from time to time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seen: dict[int, tuple[int, float]] = {}  # learner -> (progress, since when)
        self._named: set[int] = set()

    def look(self, now: float, progress: Mapping[int, int], waiting: Collection[int]) -> list[int]:
        """Learners that hang and were not named before; who waits for others is not to blame."""
        self._seen = {learner: seen for learner, seen in self._seen.items() if learner in progress}
        self._named &= set(progress)
        hanging = []
        for learner, count in progress.items():
            before, since = self._seen.get(learner, (None, now))
            if count != before or learner in waiting:
                self._seen[learner] = (count, now)
                self._named.discard(learner)
            elif now - since > self.seconds and learner not in self._named:
                self._named.add(learner)
                hanging.append(learner)
        return hanging

    def silence(self, learner: int, now: float) -> float:
        """Seconds since it was last heard of."""
        return now - self._seen[learner][1] if learner in self._seen else 0.0

"""When an epoch of a stream is over for all (M7): every learner reads a share of its own. Pure, events in, decisions out.

Takes the events of a `Ledger`, and decides who may begin a further epoch (in lockstep all at once, else everybody when it
likes, but for who finds nothing in its share) and when an epoch is done. Not responsible for what is in a stream: nobody
sees that but its learner, and what a lost one has not read is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.errors import RunError
from syncline.protocols.epoch_positions import Decision, End, EpochDone, Grant, Standing

NOBODY = -1  # has ended an epoch
NEVER = -1  # in place of an epoch that ends at once: of all that could find something in it none is left


@dataclass(slots=True)
class _Learner:
    id: int
    rank: int
    epoch: int
    first: int  # the epoch it started in
    index: int = 0  # answers so far
    begun: bool = False  # its epoch
    ended: bool = False
    wanted: int = 0  # the epoch it waits for, if it does
    queued: bool = False
    blocked: bool = False  # it does nothing until its ask is answered
    empty: bool = False  # it found nothing in its last epoch
    reached: int = 0  # batches that are in gradients
    ends: list[tuple[int, int]] = field(default_factory=list)  # (epoch, its batches up to there)
    taken: list[tuple[int, int]] = field(default_factory=list)  # batches of gradients not settled

    def past(self, epoch: int) -> bool:
        return self.epoch > epoch or (self.epoch == epoch and self.ended)

    def settled(self, epoch: int, *, published: bool) -> bool:
        """All that it read until then is in updates, or dropped; `published`: what is in no gradient, too."""
        upto = max((upto for ended, upto in self.ends if ended <= epoch), default=0)
        return (not published or self.reached >= upto) and all(start >= upto for start, _ in self.taken)


class StreamEpochs:
    """The epochs of one loader over streams, of which each learner has its own."""

    def __init__(self, *, lockstep: bool = False, standing: Standing | None = None) -> None:
        self._lockstep = lockstep
        self._done = self._newest = standing.done if standing is not None else 0
        self._last = NOBODY  # the last epoch that anybody has ended
        self._cut: int | None = None  # the epoch that the run's end cut short
        self._returned = False  # somebody has left of its own accord: the run may be over
        self._learners: dict[int, _Learner] = {}
        self._gone: dict[int, _Learner] = {}  # left, with gradients still to settle
        self._out: list[Decision] = []

    # -- events ----------------------------------------------------------------------------------------------

    def join(self, learner: int, rank: int, cycle: int = 0) -> list[Decision]:
        """It starts in the newest epoch that is not done; `cycle` as in the ledger."""
        if learner in self._learners:
            raise RunError(f"learner {learner} joins the feed twice; every learner needs an id of its own")
        epoch = max(self._newest, self._done)
        over = epoch < cycle and all(member.past(epoch) for member in self._learners.values())
        self._learners[learner] = _Learner(learner, rank, epoch, first=epoch + over, ended=over)
        return []

    def ask(self, learner: int, epoch: int) -> list[Decision]:
        """It is about to read its share of this epoch."""
        member = self._learners.get(learner)
        if member is None:
            return []
        if epoch < member.first:
            raise RunError(
                f"learner {learner} asks for epoch {epoch + 1}, but started in epoch {member.first + 1}; ask for that"
            )
        if epoch == member.epoch and not member.begun and not member.ended:
            self._enter(member, epoch)
        elif epoch > member.epoch and epoch > self._newest and (self._lockstep or member.empty):
            member.queued, member.wanted = True, epoch
        elif epoch > member.epoch:
            self._enter(member, epoch)
        return self._advance()

    def close(self, learner: int, upto: int) -> list[Decision]:
        """Its share of the epoch is over, with its first `upto` batches of all, or it broke out of its loop."""
        member = self._learners.get(learner)
        if member is None or not member.begun or member.ended:
            return []
        before = member.ends[-1][1] if member.ends else 0
        member.ended, member.empty = True, upto == before
        member.ends = [end for end in member.ends if end[0] >= self._done] + [(member.epoch, upto)]
        self._last = max(self._last, member.epoch)
        return self._advance()

    def taken(self, learner: int, upto: int) -> list[Decision]:
        """Its batches before `upto` are in a gradient of the sequence."""
        member = self._learners.get(learner)
        if member is not None and upto > member.reached:
            member.taken.append((member.reached, upto))
            member.reached = upto
        return self._advance()

    def settled(self, learner: int, upto: int, since: int = 0) -> list[Decision]:
        """Those gradients are folded or dropped (legal after it left, too); not those up to `since`."""
        member = self._learners.get(learner) or self._gone.get(learner)
        if member is not None:
            member.reached = max(member.reached, upto)
            member.taken = [part for part in member.taken if not since < part[1] <= upto]
            if not member.taken:
                self._gone.pop(learner, None)
        return self._advance()

    def block(self, learner: int, upto: int) -> list[Decision]:
        """It does nothing until its answer of index `upto` is there."""
        member = self._learners.get(learner)
        if member is not None and member.index <= upto:
            member.blocked = True
        return []

    def leave(self, learner: int, *, lost: bool) -> list[Decision]:
        """It returned or was lost. Who returns out of an epoch that it has begun does so because the run ends."""
        member = self._learners.pop(learner, None)
        if member is None:
            return []
        self._returned |= not lost
        if member.begun and not member.ended:
            if lost:
                member.ends.append((member.epoch, member.reached))
            else:
                self._cut = member.epoch if self._cut is None else min(self._cut, member.epoch)
        if member.taken:
            self._gone[learner] = member
        return self._advance()

    def change(self, *, lockstep: bool) -> list[Decision]:
        """Another dial: epochs begin for all at once from here on, or no more."""
        self._lockstep = lockstep
        if not lockstep:
            for member in self._by_rank():
                if member.queued and not member.empty:
                    self._enter(member, member.wanted)
        return self._advance()

    def part_ways(self) -> list[Decision]:
        """Those that wait begin their next epoch without the others, which wait elsewhere: see `stuck`."""
        wanted = [member.wanted for member in self._learners.values() if member.queued]
        self._newest = max(self._newest, min(wanted, default=0))
        return self._advance()

    # -- questions -------------------------------------------------------------------------------------------

    def __contains__(self, learner: int) -> bool:
        return learner in self._learners

    def stuck(self) -> set[int]:
        """Learners that do nothing until the others come."""
        return {member.id for member in self._learners.values() if member.queued and member.blocked}

    waiting = stuck

    def epoch(self, learner: int) -> int:
        """The epoch that this learner is in: a joiner's first ask is for this one."""
        member = self._learners[learner]
        return max(member.epoch, member.first)

    def epochs(self, learner: int, upto: int) -> dict[int, int]:
        """Of which epochs its batches up to there are that are in gradients not settled, and how many."""
        member, found = self._learners.get(learner) or self._gone.get(learner), dict[int, int]()
        for start, stop in member.taken if member is not None else ():
            for batch in range(start, min(stop, upto)):
                epoch = next((ended for ended, end in member.ends if batch < end), member.epoch)  # type: ignore[union-attr]
                found[epoch] = found.get(epoch, 0) + 1
        return found

    @property
    def done(self) -> int:
        """Epochs, in order."""
        return self._done

    def not_done(self, epoch: int) -> int:
        """This one, or the first after it that is not done."""
        return max(epoch, self._done)

    def holds(self, learner: int) -> tuple[int, int]:
        """Nothing that would come back."""
        return 0, 0

    def standing(self) -> Standing:
        """An epoch that is not over begins again."""
        return Standing.before(self._done)

    # -- epochs ----------------------------------------------------------------------------------------------

    def _by_rank(self) -> list[_Learner]:
        return sorted(self._learners.values(), key=lambda member: (member.rank, member.id))

    def _enter(self, member: _Learner, epoch: int) -> None:
        self._newest = max(self._newest, epoch)
        member.epoch, member.begun, member.ended, member.queued = epoch, True, False, False
        self._answer(member, Grant(member.id, member.index, epoch, 0, 0))

    def _answer(self, member: _Learner, answer: Grant | End) -> None:
        member.index += 1
        member.blocked = member.queued = False
        self._out.append(answer)

    def _advance(self) -> list[Decision]:
        waiting = [member for member in self._learners.values() if member.queued]
        if waiting:
            self._cross(waiting)
        while self._done <= self._last and self._over():
            self._out.append(EpochDone(self._done))
            self._done += 1
        if not self._out:
            return []
        out, self._out = self._out, []
        return out

    def _cross(self, waiting: list[_Learner]) -> None:
        """What they wait for has begun; or all have come, and it begins for all, unless nobody would find anything in it."""
        if len(waiting) == len(self._learners):
            if all(
                member.empty for member in waiting
            ):  # nobody is there with whom they could wait for the next
                for member in waiting:
                    member.epoch, member.begun, member.ended = member.wanted, True, True
                    found = member.wanted if self._returned else NEVER
                    self._answer(member, End(member.id, member.index, found))
                return
            self._newest = max(self._newest, min(member.wanted for member in waiting))
        for member in self._by_rank():
            if member.queued and member.wanted <= self._newest:
                self._enter(member, member.wanted)

    def _over(self) -> bool:
        """All live learners have read their shares of the first that is not done, and all that was read is settled."""
        epoch = self._done
        if self._cut is not None and epoch >= self._cut:
            return False
        live = all(
            each.past(epoch) and each.settled(epoch, published=True) for each in self._learners.values()
        )
        return live and all(each.settled(epoch, published=False) for each in self._gone.values())

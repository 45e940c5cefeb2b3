"""Who has which part of the epoch (M7): a pure state machine, events in, decisions out.

Responsible for handing out every position of every epoch once, for taking back what a lost learner had, for
the joint rounds and the barrier of lockstep, and for saying when an epoch is done. Not responsible for the
order behind the positions, for reading data, nor for when gradients are folded.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from syncline.errors import RunError, UsageError
from syncline.protocols.spans import Decision, End, EpochDone, Grant, Span, Standing


@dataclass(slots=True)
class _Epoch:
    fresh: dict[int, Span]  # not handed out yet, by owner
    left: int  # positions neither settled nor skipped
    skipped: int = 0


@dataclass(slots=True)
class _Learner:
    id: int
    rank: int
    epoch: int
    first: int  # the epoch it started in
    index: int = 0
    asks: int = 0  # not answered, of its epoch
    asked: bool = False  # it has asked for its epoch at all
    ended: bool = False
    # lists: short ones, and a deque takes half a kilobyte
    reserved: list[Span] = field(default_factory=list)  # its parts of lockstep rounds that others began
    open: list[tuple[int, Span]] = field(default_factory=list)  # granted, not taken: can come back
    taken: list[tuple[int, Span]] = field(default_factory=list)  # not settled
    blocked: bool = False  # it does nothing until its ask is answered
    wanted: int = 0  # the epoch it waits for at the barrier, if it does
    queued: int = 0  # asks for that epoch

    def past(self, epoch: int) -> bool:
        return self.epoch > epoch or (self.epoch == epoch and self.ended)


class Ledger:
    """Hands out the positions of every epoch, in order.

    Whoever asks gets the next `batch_size` positions, first of what came back. `lockstep`: parts of joint
    rounds by rank, and nobody begins an epoch before all have asked for it. `partition`: each from its own part
    first. With `epochs` the last one drains: who finds nothing waits while others have what may still come back.
    All initial learners should join before the first ask. Events of learners that have left are ignored.
    """

    def __init__(
        self,
        *,
        size: int,
        batch_size: int,
        epochs: int | None = None,
        lockstep: bool = False,
        partition: bool = False,
        learners: int = 1,
        standing: Standing | None = None,
    ) -> None:
        for name, value in (
            ("size", size),
            ("batch_size", batch_size),
            ("learners", learners),
            ("epochs", epochs),
        ):
            if value is not None and value < 1:
                raise UsageError(f"a feed needs {name} >= 1, got {name} = {value}")
        self._size, self._batch_size, self._epochs = size, batch_size, epochs
        self._lockstep, self._partition, self._parts = lockstep, partition, learners
        self._learners: dict[int, _Learner] = {}
        self._gone: dict[int, list[tuple[int, Span]]] = {}  # left, with gradients still to settle
        self._unfinished: dict[int, _Epoch] = {}
        self._newest = -1
        self._done = 0
        self._returned: list[Span] = []  # a heap, oldest first
        self._held: dict[int, _Learner] = {}  # waiting in the last epoch, in the order of their asks
        self._barrier: set[int] = set()  # waiting for the next epoch
        self._broken: set[int] = set()  # epochs that somebody broke out of
        self._orphans = False  # parts of owners that may not have come again
        self._hopeful: _Learner | None = None  # the last that had something which may come back
        self._behind: _Learner | None = None  # the last that others waited for at the barrier
        self._out: list[Decision] = []
        if standing is not None:
            self._restore(standing)

    # -- events ----------------------------------------------------------------------------------------------

    def join(self, learner: int, rank: int, cycle: int = 0) -> list[Decision]:
        """It starts in the newest open epoch, which `epoch` tells.

        Of loops over several feeds one after the other, `cycle` is the epoch that it starts with in the first: where all
        have ended the newest epoch here, and it is of an earlier cycle, theirs to come is its first.
        """
        if learner in self._learners or learner in self._gone:
            raise RunError(f"learner {learner} joins the feed twice; every learner needs an id of its own")
        epoch = max(0, self._newest)
        over = 0 <= self._newest < cycle and all(m.past(self._newest) for m in self._learners.values())
        member = _Learner(id=learner, rank=rank, epoch=epoch, first=epoch + over, ended=over)
        self._learners[learner] = member
        return []

    def ask(self, learner: int, epoch: int) -> list[Decision]:
        """It wants one more batch of this epoch; asking for a later epoch than its own ends that for it."""
        member = self._learners.get(learner)
        if member is None:
            return []
        if epoch < member.first:
            raise RunError(
                f"learner {learner} asks for epoch {epoch}, but started in epoch {member.first}; ask for that"
            )
        if epoch > member.epoch:
            self._move_on(member, epoch)
        elif epoch == member.epoch and not member.ended:
            member.asked = True
            member.asks += 1
            if self._orphans:
                self._adopt()
            self._begin(epoch)
            self._serve(member)
        return self._advance()

    def taken(self, learner: int, upto: int) -> list[Decision]:
        """Its grants before index `upto` are in a gradient of the sequence: they cannot come back."""
        member = self._learners.get(learner)
        if member is None:
            raise RunError(
                f"a gradient of learner {learner} is taken, but it is not in the feed: it left, or never joined"
            )
        _move(member.open, member.taken, upto)
        return self._advance()

    def settled(self, learner: int, upto: int, since: int = 0) -> list[Decision]:
        """Those gradients are folded or dropped (legal after it left, too); not those before `since`, which are only taken."""
        member = self._learners.get(learner)
        if member is not None:
            _move(member.open, member.taken, upto)
            self._settle(member.taken, upto, since)
        elif learner in self._gone:
            self._settle(self._gone[learner], upto, since)
            if not self._gone[learner]:
                del self._gone[learner]
        return self._advance()

    def block(self, learner: int, upto: int) -> list[Decision]:
        """It does nothing until its answer of index `upto` is there; without this it may still compute."""
        member = self._learners.get(learner)
        if member is not None and member.index <= upto:
            member.blocked = True
        return self._advance()

    def close(self, learner: int, upto: int) -> list[Decision]:
        """It broke out of its loop; grants from index `upto` on, which it did not consume, come back."""
        member = self._learners.get(learner)
        if member is None:
            return []
        unread = []
        while member.open and member.open[-1][0] >= upto:
            unread.append(member.open.pop()[1])
        self._give_back(unread)
        if member.queued:  # at the barrier: it leaves a loop that has not begun
            self._unqueue(member)
        elif member.asked and not member.ended:
            self._break_off(member)
        elif unread:
            self._broken.add(member.epoch)
        return self._advance()

    def leave(self, learner: int) -> list[Decision]:
        """It returned, raised or died; all that is not taken comes back."""
        member = self._learners.pop(learner, None)
        if member is None:
            return []
        self._held.pop(learner, None)
        self._barrier.discard(learner)
        self._give_back(span for _, span in member.open)
        self._give_back(member.reserved)
        for epoch in self._unfinished:
            self._disown(member, epoch)
        if member.taken:
            self._gone[learner] = member.taken
        return self._advance()

    def change(self, *, lockstep: bool) -> list[Decision]:
        """Another dial: joint rounds from here on, or no more of them."""
        if lockstep == self._lockstep:
            return []
        self._lockstep = lockstep
        if not lockstep:
            for member in self._by_rank():
                self._give_back(member.reserved)
                member.reserved.clear()
            for member in self._by_rank():
                if member.queued:
                    epoch, asks = member.wanted, member.queued
                    self._unqueue(member)
                    self._enter(member, epoch, asks)
        return self._advance()

    def part_ways(self) -> list[Decision]:
        """Those at the barrier begin their next epoch without the others, which wait elsewhere: see `stuck`."""
        waiting = [self._learners[learner] for learner in self._barrier]
        if waiting:
            self._begin(min(member.wanted for member in waiting))
            for member in waiting:
                self._resume(member)
            for member in sorted(waiting, key=lambda member: (member.rank, member.id)):
                if member.asks:
                    self._serve(member)
        return self._advance()

    # -- questions -------------------------------------------------------------------------------------------

    def __contains__(self, learner: int) -> bool:
        return learner in self._learners

    def stuck(self) -> set[int]:
        """Learners that do nothing until the others come to the barrier."""
        return {learner for learner in self._barrier if self._learners[learner].blocked}

    def waiting(self) -> set[int]:
        """Learners that do nothing until others go on: at the barrier, or in the last epoch."""
        return self.stuck() | {learner for learner, member in self._held.items() if member.blocked}

    def epoch(self, learner: int) -> int:
        """The epoch that this learner is in: a joiner's first ask is for this one."""
        member = self._learners[learner]
        return max(member.epoch, member.first)

    def holds(self, learner: int) -> tuple[int, int]:
        """Positions it has that would come back, and those that are in gradients not yet folded."""
        member = self._learners.get(learner)
        if member is None:
            return 0, 0
        open_ = [span for _, span in member.open] + list(member.reserved)
        return _length(open_), _length(span for _, span in member.taken)

    def standing(self) -> Standing:
        """Everything not settled, as of now."""
        taken = [span for _, span in (pair for gone in self._gone.values() for pair in gone)]
        for member in self._learners.values():
            taken += [span for _, span in (*member.open, *member.taken)]
            taken += member.reserved
        return Standing(
            done=self._done,
            newest=self._newest,
            fresh={
                epoch: {owner: (span.start, span.stop) for owner, span in state.fresh.items()}
                for epoch, state in self._unfinished.items()
            },
            returned=sorted((span.epoch, span.start, span.stop) for span in (*self._returned, *taken)),
            skipped={epoch: state.skipped for epoch, state in self._unfinished.items()},
            broken=sorted(self._broken),
        )

    def _restore(self, standing: Standing) -> None:
        self._done, self._newest = standing.done, standing.newest
        self._returned = sorted(Span(*span) for span in standing.returned)  # a sorted list is a heap
        self._broken = set(standing.broken)
        self._orphans = True
        for epoch, owners in standing.fresh.items():
            fresh = {owner: Span(epoch, *ends) for owner, ends in owners.items()}
            back = (span for span in self._returned if span.epoch == epoch)
            left = _length(fresh.values()) + _length(back)
            if self._partition:
                self._reown(epoch, fresh)
            self._unfinished[epoch] = _Epoch(fresh=fresh, left=left, skipped=standing.skipped[epoch])

    def _reown(self, epoch: int, fresh: dict[int, Span]) -> None:
        """What owners had of their parts comes first in these again, so that joint rounds are as they were."""
        ends = {span.stop: span for span in self._returned if span.epoch == epoch}
        for owner, part in self._owned(epoch).items():
            start = fresh[owner].start if owner in fresh else part.stop
            while start > part.start and start in ends:
                self._returned.remove(ends[start])
                start = ends[start].start
            if start < part.stop:
                fresh[owner] = part._replace(start=start)

    def _adopt(self) -> None:
        """All have come who go on with the feed: what has no owner in its epoch any more is for everybody."""
        self._orphans = False
        owners = {self._owner(member) for member in self._learners.values()}
        for epoch, state in self._unfinished.items():
            for owner in [owner for owner in state.fresh if epoch < self._newest or owner not in owners]:
                self._give_back([state.fresh.pop(owner)])

    def idle(self, learner: int) -> bool:
        """Lockstep quorums need not wait for it: it has nothing to compute until others go on."""
        member = self._learners.get(learner)
        return self._lockstep and (member is None or self._rests(member))

    def _rests(self, member: _Learner) -> bool:
        # An end may be given ahead: until its last batches are taken it still computes. At the barrier it does
        # not: what is left open there was consumed, and belongs to a later gradient.
        without = member.ended or member.id in self._held
        return without and (not member.open or member.queued > 0)

    # -- handing out -----------------------------------------------------------------------------------------

    def _serve(self, member: _Learner) -> None:
        """Answer its asks as far as there is data; then end its epoch, or let it wait."""
        while member.asks and (span := self._claim(member)):
            member.asks -= 1
            member.open.append((member.index, span))
            self._out.append(Grant(member.id, self._count(member), *span))
        if not member.asks:
            self._held.pop(member.id, None)
        elif self._epochs == member.epoch + 1:
            self._held.setdefault(member.id, member)
        else:
            self._end(member)

    def _claim(self, member: _Learner) -> Span | None:
        if not self._lockstep:
            return self._next(member)
        if not member.reserved:
            self._form_round(member.epoch)
        return member.reserved.pop(0) if member.reserved else None

    def _form_round(self, epoch: int) -> None:
        """The next joint slice: a part for each learner that has not ended, in rank order."""
        state = self._unfinished.get(epoch)
        if not self._returned and not (state and state.fresh):
            return
        for member in self._by_rank():
            if member.epoch == epoch and not member.ended and (span := self._next(member)):
                member.reserved.append(span)

    def _next(self, member: _Learner) -> Span | None:
        if self._partition:
            return self._next_fresh(member) or self._next_returned(member)
        return self._next_returned(member) or self._next_fresh(member)

    def _next_fresh(self, member: _Learner) -> Span | None:
        state, owner = self._unfinished.get(member.epoch), member.rank if self._partition else 0
        whole = state.fresh.get(owner) if state is not None else None
        if state is None or whole is None:
            return None
        span, rest = whole.cut(self._batch_size)
        if rest:
            state.fresh[owner] = rest
        else:
            del state.fresh[owner]
        return span

    def _next_returned(self, member: _Learner) -> Span | None:
        if not self._returned or self._returned[0].epoch > member.epoch:
            return None
        span, rest = heapq.heappop(self._returned).cut(self._batch_size)
        if rest:
            heapq.heappush(self._returned, rest)
        return span

    def _end(self, member: _Learner) -> None:
        member.ended = True
        member.asks = 0
        self._held.pop(member.id, None)
        self._out.append(End(member.id, self._count(member), member.epoch))

    def _count(self, member: _Learner) -> int:
        member.blocked = False
        member.index += 1
        return member.index - 1

    def _by_rank(self) -> list[_Learner]:
        return sorted(self._learners.values(), key=lambda member: (member.rank, member.id))

    # -- coming back -----------------------------------------------------------------------------------------

    def _give_back(self, spans: Iterable[Span]) -> None:
        for span in spans:
            heapq.heappush(self._returned, span)

    def _owner(self, member: _Learner) -> int:
        return member.rank if self._partition else 0

    def _disown(self, member: _Learner, epoch: int) -> None:
        """What is fresh in its part of the epoch goes to the others."""
        state = self._unfinished.get(epoch)
        if self._partition and state and member.rank in state.fresh:
            self._give_back([state.fresh.pop(member.rank)])

    def _break_off(self, member: _Learner) -> None:
        """It is out of its epoch before the end."""
        self._give_back(member.reserved)
        member.reserved.clear()
        self._disown(member, member.epoch)
        member.asks = 0
        member.ended = True
        self._held.pop(member.id, None)
        self._broken.add(member.epoch)

    def _settle(self, taken: list[tuple[int, Span]], upto: int, since: int) -> None:
        first, done = _before(taken, since) if since else 0, _before(taken, upto)
        for _, span in taken[first:done]:
            self._unfinished[span.epoch].left -= span.stop - span.start
        del taken[first:done]

    # -- epochs ----------------------------------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        while self._newest < epoch:
            self._newest += 1
            self._unfinished[self._newest] = _Epoch(fresh=self._shares(self._newest), left=self._size)

    def _shares(self, epoch: int) -> dict[int, Span]:
        if not self._partition:
            return {0: Span(epoch, 0, self._size)}
        shares = self._owned(epoch)
        ranks = {member.rank for member in self._learners.values()}
        self._give_back(shares.pop(rank) for rank in list(shares) if rank not in ranks)
        return shares

    def _owned(self, epoch: int) -> dict[int, Span]:
        """The part of each rank."""
        bounds = [part * self._size // self._parts for part in range(self._parts + 1)]
        return {rank: Span(epoch, *ends) for rank, ends in enumerate(pairwise(bounds)) if ends[0] < ends[1]}

    def _move_on(self, member: _Learner, epoch: int) -> None:
        """It asks for a later epoch than its own."""
        if not member.ended:
            self._break_off(member)
        if self._epochs is not None and epoch >= self._epochs:
            self._unqueue(member)
            member.epoch = epoch
            self._end(member)
        elif epoch > self._newest and (self._lockstep or self._is_guest(member)):
            self._queue(member, epoch)
        else:
            self._enter(member, epoch, 1)

    def _is_guest(self, member: _Learner) -> bool:
        """It has no part of its own, others have: they begin epochs, or it would run through them without end."""
        if not self._partition:
            return False
        owned = self._owned(0)
        return member.rank not in owned and any(other.rank in owned for other in self._learners.values())

    def _admit_late(self) -> None:
        """What they wait for has begun."""
        for member in [self._learners[each] for each in self._barrier]:
            if member.wanted <= self._newest:
                epoch, asks = member.wanted, member.queued
                self._unqueue(member)
                self._enter(member, epoch, asks)

    def _enter(self, member: _Learner, epoch: int, asks: int) -> None:
        self._broken.update(range(member.epoch + 1, epoch))
        self._begin(epoch)
        member.epoch, member.ended = epoch, False
        member.asks, member.asked = asks, True
        self._serve(member)

    def _queue(self, member: _Learner, epoch: int) -> None:
        member.queued = member.queued + 1 if epoch == member.wanted else 1
        member.wanted = epoch
        self._barrier.add(member.id)

    def _unqueue(self, member: _Learner) -> None:
        member.queued = 0
        self._barrier.discard(member.id)

    def _cross_barrier(self) -> None:
        """All have ended the epoch and want the next: it begins for all, but who is beyond the last.

        Nobody crosses while one is still on its way: it may yet publish a gradient of the old epoch, and the
        others would not know to which fold it belongs.
        """
        while self._barrier and not self._on_their_way():
            self._begin(self._newest + 1)
            for member in self._learners.values():
                self._resume(member)
            for member in self._by_rank():
                if member.asks:
                    self._serve(member)
            self._skip_leftovers()

    def _on_their_way(self) -> bool:
        """Somebody has not come to the barrier yet; who it was the last time is asked first."""
        last = self._behind
        if last is not None and last.id in self._learners and not self._has_come(last):
            return True
        self._behind = next((m for m in self._learners.values() if not self._has_come(m)), None)
        return self._behind is not None

    def _has_come(self, member: _Learner) -> bool:
        return member.queued > 0 or member.epoch > self._newest

    def _resume(self, member: _Learner) -> None:
        if member.epoch >= self._newest:
            return
        self._broken.update(range(member.epoch + 1, self._newest))
        member.epoch = self._newest
        if member.wanted > self._newest:  # it left this one unseen
            self._broken.add(self._newest)
            return
        member.ended = False
        member.asks, member.asked = member.queued, True
        self._unqueue(member)

    # -- after every event -----------------------------------------------------------------------------------

    def _advance(self) -> list[Decision]:
        if self._returned:
            for member in list(self._held.values()):
                self._serve(member)
        if self._held:
            self._release_held()
        if self._broken:
            self._skip_leftovers()
        if self._barrier:
            self._admit_late()
            self._cross_barrier()
        state = self._unfinished.get(self._done)
        if state is not None and state.left == 0:
            self._finish_epochs()
        if not self._out:
            return []
        out, self._out = self._out, []
        return out

    def _release_held(self) -> None:
        """End those for whom nothing can come back, and only who is blocked: the others may still be needed.

        Of several that are blocked, who has consumed something goes first and publishes it; the others stay, and
        get it if that fails.
        """
        while self._held and not self._hope():
            blocked = [member for member in self._held.values() if member.blocked]
            if not blocked:
                return
            self._end(next((member for member in reversed(blocked) if self._may_return(member)), blocked[-1]))

    def _hope(self) -> bool:
        """Something may come back from one that is not blocked; who it was the last time is asked first."""
        last = self._hopeful
        if last is not None and last.id in self._learners and self._gives_hope(last):
            return True
        self._hopeful = next((m for m in self._learners.values() if self._gives_hope(m)), None)
        return self._hopeful is not None

    def _gives_hope(self, member: _Learner) -> bool:
        return not (member.blocked and member.id in self._held) and self._may_return(member)

    def _may_return(self, member: _Learner) -> bool:
        if member.open or member.reserved:
            return True
        return self._partition and any(member.rank in state.fresh for state in self._unfinished.values())

    def _skip_leftovers(self) -> None:
        """What is left of an epoch that learners broke out of is wanted by nobody once all are past it."""
        for epoch in sorted(self._broken):
            everybody = self._learners.values()
            if epoch in self._unfinished and everybody and all(member.past(epoch) for member in everybody):
                self._skip(epoch, self._unfinished[epoch])

    def _skip(self, epoch: int, state: _Epoch) -> None:
        back = [span for span in self._returned if span.epoch == epoch]
        skipped = sum(span.stop - span.start for span in (*state.fresh.values(), *back))
        state.fresh.clear()
        state.left -= skipped
        state.skipped += skipped
        if back:
            self._returned = [span for span in self._returned if span.epoch != epoch]
            heapq.heapify(self._returned)

    def _finish_epochs(self) -> None:
        while (state := self._unfinished.get(self._done)) and state.left == 0:
            self._out.append(EpochDone(self._done, state.skipped))
            del self._unfinished[self._done]
            self._broken.discard(self._done)
            self._done += 1


def _length(spans: Iterable[Span]) -> int:
    return sum(span.stop - span.start for span in spans)


def _before(spans: list[tuple[int, Span]], upto: int) -> int:
    """How many have a smaller index; they are in its order."""
    count = 0
    while count < len(spans) and spans[count][0] < upto:
        count += 1
    return count


def _move(source: list[tuple[int, Span]], target: list[tuple[int, Span]], upto: int) -> None:
    if source:
        count = _before(source, upto)
        target += source[:count]
        del source[:count]

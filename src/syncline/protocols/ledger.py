"""Who has which part of the epoch (M7): a pure state machine, events in, decisions out.

Responsible for handing out every position of every epoch once, for taking back what a lost learner had, for
the joint rounds and the barrier of lockstep, and for saying when an epoch is done. Not responsible for which
positions there are (`epoch_positions`), for the order behind them, for reading data, nor for when gradients are folded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from syncline.errors import RunError, UsageError
from syncline.protocols.epoch_positions import Decision, End, EpochPositions, Grant, Span, Standing, length


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
    held: int = 0  # counts those that wait in the last epoch, in the order of their asks
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
        self._epochs, self._lockstep = epochs, lockstep
        self._stock = EpochPositions(
            size=size, batch_size=batch_size, partition=partition, parts=learners, standing=standing
        )
        self._learners: dict[int, _Learner] = {}
        self._gone: dict[int, list[tuple[int, Span]]] = {}  # left, with gradients still to settle
        self._held: dict[int, _Learner] = {}  # waiting in the last epoch, in the order of their asks
        self._stopped: dict[int, _Learner] = {}  # those of them that are blocked
        self._holds = 0  # how often somebody was held
        # all that may have something which may come back, and others; None before anybody is held
        self._hopeful: dict[int, _Learner] | None = None
        self._barrier: set[int] = set()  # waiting for the next epoch
        self._behind: _Learner | None = None  # the last that others waited for at the barrier
        self._out: list[Decision] = []

    # -- events ----------------------------------------------------------------------------------------------

    def join(self, learner: int, rank: int, cycle: int = 0) -> list[Decision]:
        """It starts in the newest open epoch, which `epoch` tells.

        Of loops over several feeds one after the other, `cycle` is the epoch that it starts with in the first: where all
        have ended the newest epoch here, and it is of an earlier cycle, theirs to come is its first.
        """
        if learner in self._learners or learner in self._gone:
            raise RunError(f"learner {learner} joins the feed twice; every learner needs an id of its own")
        epoch = max(0, self._stock.newest)
        over = 0 <= self._stock.newest < cycle and all(
            m.past(self._stock.newest) for m in self._learners.values()
        )
        member = _Learner(id=learner, rank=rank, epoch=epoch, first=epoch + over, ended=over)
        self._learners[learner] = member
        self._look_at(member)
        return []

    def ask(self, learner: int, epoch: int) -> list[Decision]:
        """It wants one more batch of this epoch; asking for a later epoch than its own ends that for it."""
        member = self._learners.get(learner)
        if member is None:
            return []
        if epoch < member.first:
            raise RunError(
                f"learner {learner} asks for epoch {epoch + 1}, but started in epoch {member.first + 1}; ask for that"
            )
        if epoch > member.epoch:
            self._move_on(member, epoch)
        elif epoch == member.epoch and not member.ended:
            member.asked = True
            member.asks += 1
            if self._stock.orphans:
                self._stock.adopt(self._ranks())
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
        _take(member, upto)
        return self._advance()

    def settled(self, learner: int, upto: int, since: int = 0) -> list[Decision]:
        """Those gradients are folded or dropped (legal after it left, too); not those before `since`, which are only taken."""
        member = self._learners.get(learner)
        if member is not None:
            _take(member, upto)
        taken = member.taken if member is not None else self._gone.get(learner, [])
        first = 0  # they are in the order of their indices
        while first < len(taken) and taken[first][0] < since:
            first += 1
        while first < len(taken) and taken[first][0] < upto:
            self._stock.settle(taken.pop(first)[1])
        if not taken:
            self._gone.pop(learner, None)
        return self._advance()

    def block(self, learner: int, upto: int) -> list[Decision]:
        """It does nothing until its answer of index `upto` is there; without this it may still compute."""
        member = self._learners.get(learner)
        if member is not None and member.index <= upto:
            member.blocked = True
            if learner in self._held:
                self._stopped[learner] = member
        return self._advance()

    def close(self, learner: int, upto: int) -> list[Decision]:
        """It broke out of its loop; grants from index `upto` on, which it did not consume, come back."""
        member = self._learners.get(learner)
        if member is None:
            return []
        unread = []
        while member.open and member.open[-1][0] >= upto:
            unread.append(member.open.pop()[1])
        self._stock.give_back(unread)
        if member.queued:  # at the barrier: it leaves a loop that has not begun
            self._unqueue(member)
        elif member.asked and not member.ended:
            self._break_off(member)
        elif unread:
            self._stock.broken.add(member.epoch)
        return self._advance()

    def leave(self, learner: int) -> list[Decision]:
        """It returned, raised or died; all that is not taken comes back."""
        member = self._learners.pop(learner, None)
        if member is None:
            return []
        self._let_go(member)
        if self._hopeful is not None:
            self._hopeful.pop(learner, None)
        self._barrier.discard(learner)
        self._stock.give_back(span for _, span in member.open)
        self._stock.give_back(member.reserved)
        self._stock.disown(member.rank)
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
                self._stock.give_back(member.reserved)
                member.reserved.clear()
            for member in self._by_rank():
                if member.queued:
                    self._let_in(member)
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
        return self.stuck() | self._stopped.keys()

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
        return length(open_), length(span for _, span in member.taken)

    @property
    def done(self) -> int:
        """Epochs that are done, in order: later ones may be done before them."""
        return self._stock.done

    def not_done(self, epoch: int) -> int:
        """That epoch, or the first after it that is not done."""
        return self._stock.not_done(epoch)

    def epochs(self, learner: int, upto: int) -> dict[int, int]:
        """Of which epochs its positions before that index are that are not settled, and how many."""
        member, found = self._learners.get(learner), dict[int, int]()
        spans = self._gone.get(learner, ()) if member is None else chain(member.taken, member.open)
        for index, span in spans:
            if index < upto:
                found[span.epoch] = found.get(span.epoch, 0) + span.stop - span.start
        return found

    def standing(self) -> Standing:
        """Everything not settled, as of now."""
        taken = [span for _, span in (pair for gone in self._gone.values() for pair in gone)]
        for member in self._learners.values():
            taken += [span for _, span in (*member.open, *member.taken)]
            taken += member.reserved
        return self._stock.standing(taken)

    # -- handing out -----------------------------------------------------------------------------------------

    def _serve(self, member: _Learner) -> None:
        """Answer its asks as far as there is data; then end its epoch, or let it wait."""
        while member.asks and (span := self._claim(member)):
            member.asks -= 1
            member.open.append((member.index, span))
            self._out.append(Grant(member.id, self._count(member), *span))
        if not member.asks:
            self._let_go(member)
        elif self._epochs != member.epoch + 1:
            self._end(member)
        elif member.id not in self._held:
            self._holds += 1
            member.held = self._holds
            self._held[member.id] = member
            if member.blocked:
                self._stopped[member.id] = member

    def _claim(self, member: _Learner) -> Span | None:
        """In lockstep its part of the next joint slice, which all learners that have not ended get at once, in rank order."""
        epoch, stock = member.epoch, self._stock
        if not self._lockstep:
            return stock.next(epoch, member.rank)
        if not member.reserved and stock.has(epoch):
            for each in self._by_rank():
                if each.epoch == epoch and not each.ended and (span := stock.next(epoch, each.rank)):
                    each.reserved.append(span)
                    self._look_at(each)
        return member.reserved.pop(0) if member.reserved else None

    def _end(self, member: _Learner) -> None:
        member.ended = True
        member.asks = 0
        self._let_go(member)
        self._out.append(End(member.id, self._count(member), member.epoch))

    def _count(self, member: _Learner) -> int:
        if member.blocked:
            member.blocked = False
            self._stopped.pop(member.id, None)
        self._look_at(member)
        member.index += 1
        return member.index - 1

    def _by_rank(self) -> list[_Learner]:
        return sorted(self._learners.values(), key=lambda member: (member.rank, member.id))

    # -- coming back -----------------------------------------------------------------------------------------

    def _break_off(self, member: _Learner) -> None:
        """It is out of its epoch before the end."""
        self._stock.give_back(member.reserved)
        member.reserved.clear()
        self._stock.disown(member.rank, member.epoch)
        member.asks = 0
        member.ended = True
        self._let_go(member)
        self._stock.broken.add(member.epoch)

    # -- epochs ----------------------------------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        if epoch > self._stock.newest:
            self._stock.begin(epoch, self._ranks())
            self._hopeful = None  # parts of their own are there for all

    def _ranks(self) -> set[int]:
        return {member.rank for member in self._learners.values()}

    def _move_on(self, member: _Learner, epoch: int) -> None:
        """It asks for a later epoch than its own.

        Who has no part of its own, where others have, does not begin one: it would run through epochs without end.
        """
        if not member.ended:
            self._break_off(member)
        if self._epochs is not None and epoch >= self._epochs:
            self._unqueue(member)
            member.epoch = epoch
            self._end(member)
            return
        waits = epoch > self._stock.newest
        if waits and not self._lockstep:
            owners = self._stock.owners()
            waits = member.rank not in owners and bool(owners & self._ranks())
        if waits:
            member.queued = member.queued + 1 if epoch == member.wanted else 1
            member.wanted = epoch
            self._barrier.add(member.id)
        else:
            self._enter(member, epoch, 1)

    def _let_in(self, member: _Learner) -> None:
        """From the barrier."""
        asks = member.queued
        self._unqueue(member)
        self._enter(member, member.wanted, asks)

    def _enter(self, member: _Learner, epoch: int, asks: int) -> None:
        self._stock.broken.update(range(member.epoch + 1, epoch))
        self._begin(epoch)
        member.epoch, member.ended = epoch, False
        member.asks, member.asked = asks, True
        self._serve(member)

    def _unqueue(self, member: _Learner) -> None:
        member.queued = 0
        self._barrier.discard(member.id)

    def _cross_barrier(self) -> None:
        """All have ended the epoch and want the next: it begins for all, but who is beyond the last.

        Nobody crosses while one is still on its way: it may yet publish a gradient of the old epoch, and the
        others would not know to which fold it belongs. Who was on its way the last time is asked first.
        """
        while self._barrier:
            newest, last = self._stock.newest, self._behind
            if last is None or last.id not in self._learners or last.queued or last.epoch > newest:
                away = (m for m in self._learners.values() if not m.queued and m.epoch <= newest)
                self._behind = next(away, None)
            if self._behind is not None:
                return
            self._begin(newest + 1)
            for member in self._learners.values():
                self._resume(member)
            for member in self._by_rank():
                if member.asks:
                    self._serve(member)
            self._skip_leftovers()

    def _resume(self, member: _Learner) -> None:
        if member.epoch >= self._stock.newest:
            return
        self._stock.broken.update(range(member.epoch + 1, self._stock.newest))
        member.epoch = self._stock.newest
        if member.wanted > self._stock.newest:  # it left this one unseen
            self._stock.broken.add(self._stock.newest)
            return
        member.ended = False
        member.asks, member.asked = member.queued, True
        self._unqueue(member)

    # -- after every event -----------------------------------------------------------------------------------

    def _advance(self) -> list[Decision]:
        stock = self._stock
        if stock.returned:
            for member in list(self._held.values()):
                self._serve(member)
        if self._held:
            self._release_held()
        if stock.broken:
            self._skip_leftovers()
        if self._barrier:
            for member in [self._learners[each] for each in self._barrier]:
                if member.wanted <= stock.newest:  # it has begun
                    self._let_in(member)
            self._cross_barrier()
        if stock.over:
            self._out += stock.finish()
        if not self._out:
            return []
        out, self._out = self._out, []
        return out

    def _release_held(self) -> None:
        """End those for whom nothing can come back, and only who is blocked: the others may still be needed.

        Of several that are blocked, who has consumed something goes first and publishes it; the others stay, and
        get it if that fails. Who may have come to have something is looked at until one has: each costs once, however many there are.
        """
        if not self._stopped:
            return
        if self._hopeful is None:
            self._hopeful = dict(self._learners)
        while self._hopeful:
            learner, member = next(reversed(self._hopeful.items()))
            if learner not in self._stopped and self._may_return(member):
                return
            del self._hopeful[learner]
        last = sorted(self._stopped.values(), key=lambda member: -member.held)
        first = next((member for member in last if self._may_return(member)), None)
        for member in last if first is None else [first]:
            self._end(member)

    def _look_at(self, member: _Learner) -> None:
        """It may have something now that may come back, or may go on."""
        if self._hopeful is not None:
            self._hopeful[member.id] = member

    def _let_go(self, member: _Learner) -> None:
        if self._held.pop(member.id, None) is not None:
            self._stopped.pop(member.id, None)
            self._look_at(member)

    def _may_return(self, member: _Learner) -> bool:
        return bool(member.open or member.reserved) or self._stock.owns(member.rank)

    def _skip_leftovers(self) -> None:
        """What is left of an epoch that learners broke out of is wanted by nobody once all are past it."""
        for epoch in sorted(self._stock.broken):
            everybody = self._learners.values()
            if self._stock.left(epoch) and everybody and all(member.past(epoch) for member in everybody):
                self._stock.skip(epoch)


def _take(member: _Learner, upto: int) -> None:
    """What it was granted before that index is in a gradient."""
    while member.open and member.open[0][0] < upto:
        member.taken.append(member.open.pop(0))

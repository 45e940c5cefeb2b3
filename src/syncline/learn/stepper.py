"""A learner's side of a table and of a feed, without I/O: what it says, what it waits for, when it reads (M1, M2, M7, M9).

Generators that give out what they wait for and get it sent in: `SharedOptimizer` blocks on its port for it, the simulator's built-in
learners give way. What is the learner's own (parameters, gradients, batches, random states) is its `Replica`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, SupportsFloat

from syncline import messages as m
from syncline.dial import Sync
from syncline.messages import to_leader as say
from syncline.ports import OUTSIDE, Draft, Portion, Reading

# -- what is waited for --------------------------------------------------------------------------------------


class Ticket(NamedTuple):
    """Its reading; without `block` what there is of it now. Without a number: nothing that was published is under way."""

    number: int | None
    block: bool = True


class FreeDraft(NamedTuple):
    """A draft; without `block` None where none is free."""

    block: bool = True


Wait = Ticket | FreeDraft | m.AskDial  # this the coordinator answers
Steps = Generator[Wait, Any, None]
# (examples, loader, portions used), changes of the group options so far, the random generators' states where they are to be kept, the loss
Sealed = tuple[tuple[int, int, int], int, bytes, SupportsFloat]


class Replica(ABC):
    """What the stepper has of its learner."""

    @abstractmethod
    def fill(self, draft: Draft) -> list[bool]:
        """The gradient into a draft; which parameters have one, nothing where all have."""

    @abstractmethod
    def add(self, draft: Draft, *, first: bool) -> None:
        """The gradient to the sum in a draft."""

    @abstractmethod
    def added(self) -> list[bool]:
        """Which parameters have a gradient in the sum, nothing where all have."""

    @abstractmethod
    def move(self, rate: float) -> None:
        """By its own gradient."""

    @abstractmethod
    def seal(self, draft: Draft, said: Any, *, keep: bool) -> Sealed:
        """What goes with the gradient that is published now is in the draft too."""

    @abstractmethod
    def publish(self, draft: Draft, gradient: say.Gradient, present: list[bool]) -> None: ...

    @abstractmethod
    def read(self, reading: Reading, *, known: bool) -> int | None:
        """Take a version over, `known`: unless it has it still; which one it has now. None: it was overtaken."""

    def flow(self) -> int:
        """Take over the newest version that has come unasked; which one it has now."""
        raise AssertionError("versions flow down trees only")

    def overtaken(self) -> bool:
        """Of what comes unasked nothing can be read: newer versions come faster."""
        return False

    def several(self) -> bool:
        """Batches may be of several loaders, of which is told beside the gradient."""
        return False

    @abstractmethod
    def begun(self) -> bool:
        """Batches of the next gradient were computed."""

    @abstractmethod
    def awaits(self, number: int) -> None:
        """It does nothing until this ticket is let go."""


class Stepper:
    """One table, seen by one learner; `post` tells the leading shard. `tree`: gradients take another way there, and what is
    said may come before them; `casts`: versions flow down it unasked (R8)."""

    def __init__(
        self,
        number: int,
        sync: Sync,
        replica: Replica,
        post: Callable[..., None],
        steps: int = 0,
        *,
        tree: bool = False,
        casts: bool = False,
    ) -> None:
        self.number, self.sync, self.steps = number, sync, steps
        self._replica, self._post_to, self._tree, self._casts = replica, post, tree, casts
        self._dials = {0: sync}  # that it knows, by number
        self._dial = -1
        self._free = casts and not sync.waits  # it waits neither for its gradient nor for a version
        self.keep = False  # a checkpoint follows the next gradient
        self._locals = 0  # local steps
        self.begin()

    def begin(self) -> None:
        """Nothing is under way: the servers are new."""
        self.version, self.tickets = -1, 0
        self._stamp: int | None = None  # of the gradient that is being made, where it is not the version
        self._added = 0  # gradients in the sum, since the last push
        self._said: Any = None  # of its loss
        self._pushed = -1  # the ticket of the last push
        self._draft: Draft | None = None  # that is being filled
        self._fetching: tuple[int, int] | None = None  # (ticket, step by which it must be here)
        self._silent = False  # gradients may be under way that it did not wait for

    def ticket(self) -> int:
        """Numbers what this learner asks of this table."""
        self.tickets += 1
        return self.tickets - 1

    # -- the step ----------------------------------------------------------------------------------------

    def step(self, said: Any) -> Steps:
        """The gradient is made: publish it, wait as the dial says, read one version."""
        if self.sync.local:
            yield from self._step_locally(said)
        elif self._added:  # the dial has changed since: they go out together
            yield from self._add(said)
            yield from self.read(self.push())
        else:
            draft = yield from self._drafted()
            number = self._publish(draft, self._replica.fill(draft), said)
            if not self._free:
                yield from self._take_over((yield Ticket(number)))
                return
            yield from self._hear()  # as soon as a former gradient is delivered; two are never merged
            if self._free:
                self.version = self._replica.flow()  # what has flowed down by now (R8)

    def _hear(self) -> Steps:
        """What the servers say beside the versions: whether a checkpoint follows, or another dial."""
        if self._fetching is not None:
            reading: Reading | None = yield Ticket(self._fetching[0], block=False)
            if reading is None:
                return
            self._fetching, self.keep = None, reading.keep
            if reading.dial != self._dial or reading.delivered:
                yield from self._take_over(reading)
        if self._free:
            overtaken = self._replica.overtaken()
            has = -1 if overtaken else self.version
            self._fetching = (self._fetch(deliver=overtaken, has=has), 0)

    def _drafted(self) -> Generator[Wait, Any, Draft]:
        """Kept until it is published: what cannot be published is filled again."""
        if self._silent and self._replica.several():  # of which is told before it
            yield from self.deliver()
        if self._draft is None:
            self._draft = yield FreeDraft(block=False)
        if self._draft is None:
            self._replica.awaits(self.tickets - 1)
            self._draft = yield FreeDraft()
        assert self._draft is not None
        return self._draft

    def deliver(self) -> Steps:
        """What it did not wait for is there: whatever is said from here on comes after it."""
        if self._tree and self._silent:
            self._silent = False
            self._replica.awaits(self.tickets - 1)
            yield Ticket(None)

    def _publish(self, draft: Draft, present: list[bool], said: Any) -> int:
        usage, options, states, loss = self._replica.seal(draft, said, keep=self.keep)
        number, silent = self.tickets, self.sync.local or self._free
        self.tickets += 1
        stamp = self.version if self._stamp is None else self._stamp
        gradient = say.Gradient(
            self.number, number, stamp, self.steps, *usage, options, not present, silent, states, loss
        )
        self.steps += 1
        self.keep, self._draft, self._stamp = False, None, None
        self._silent |= silent
        self._replica.publish(draft, gradient, present)
        return number

    # -- reading -----------------------------------------------------------------------------------------

    def read(self, number: int) -> Steps:
        """Take over the version that this ticket's reading names."""
        yield from self._take_over((yield Ticket(number)))

    def rested(self, number: int) -> Steps:
        """There is data again: read what the others have; who steps by itself goes on where it was."""
        reading, before = (yield Ticket(number)), self.version
        if not (self.sync.local and reading.dial == self._dial):
            yield from self._take_over(reading)
            # in lockstep rounds are what all publish next
            moved = self.version != before and not self.sync.lockstep
            if moved and self._stamp is None and self._replica.begun():
                self._stamp = before  # batches of the next gradient were computed on it

    def _take_over(self, reading: Reading) -> Steps:
        self.keep = reading.keep
        if reading.dial != self._dial:
            if self._tree and self._silent:  # the servers did not know of all that it has published
                yield from self.deliver()
                number = self._fetch()
                self._replica.awaits(number)
                reading = yield Ticket(number)
                self.keep |= reading.keep
            if reading.dial not in self._dials:
                self._dials[reading.dial] = yield m.AskDial(reading.dial)
            self._dial, self.sync, self._fetching = reading.dial, self._dials[reading.dial], None
            self._free = self._casts and not self.sync.waits
        version = self._replica.read(reading, known=reading.version <= self.version)
        if version is None:  # newer versions came faster than it could read: one is delivered
            delivered: Reading = yield Ticket(self._fetch(deliver=True))
            yield from self._take_over(delivered._replace(keep=delivered.keep or reading.keep))
        else:
            self.version = version

    def rest(self, place: tuple[int, int] | None, states: bytes, *, later: bool) -> int:
        """Say that there is nothing to compute before this portion (a loader, its index), or that there is something again; the
        ticket with which to read afterwards."""
        number = self.ticket()
        if place is None:
            self._post_to(say.Reread(self.number, number, states), later=later)
        else:
            self._post_to(say.Rest(self.number, number, *place, states), later=later)
        return number

    # -- local steps (M9) --------------------------------------------------------------------------------

    def _step_locally(self, said: Any) -> Steps:
        """Move by itself, add to the sum, push and fetch when their steps have come.

        The shards fold and copy meanwhile. A fetch is waited for only when the next but one would begin; own movement since it
        is lost.
        """
        yield from self._add(said)
        if self.sync.fetch > 1:
            assert self.sync.local_lr is not None
            self._replica.move(self.sync.local_lr)
        self._locals += 1
        if self._added >= self.sync.push:
            self.push()
        if self._locals % self.sync.fetch == 0 and self._fetching is None:
            self._fetching = (self._fetch(), self._locals + self.sync.fetch - 1)
        if self._fetching is None:
            return
        number, due = self._fetching
        reading: Reading | None = yield Ticket(number, block=False)
        if reading is None and self._locals >= due:
            self._replica.awaits(number)
            reading = yield Ticket(number)
        if reading is None:
            return
        self._fetching = None
        if reading.dial != self._dial and self._pushed > number:
            number = self._fetch()  # pushed since: it may be folded while this reads
            self._replica.awaits(number)
            reading = yield Ticket(number)
        assert reading is not None
        yield from self._take_over(reading)

    def _add(self, said: Any) -> Steps:
        """Add the gradient to the sum, which lies in a draft."""
        draft = yield from self._drafted()
        self._replica.add(draft, first=self._added == 0)
        self._added += 1
        self._said = said

    def push(self) -> int:
        """Publish the sum, be it of fewer steps than the dial says; its ticket, or the last without one."""
        if not self._added:
            return self.tickets - 1
        assert self._draft is not None
        said, self._said, self._added = self._said, None, 0
        self._pushed = self._publish(self._draft, self._replica.added(), said)
        return self._pushed

    def _fetch(self, *, deliver: bool = False, has: int = -1) -> int:
        number = self.ticket()
        self._post_to(say.Fetch(self.number, number, deliver, has))
        return number


# -- the feed ------------------------------------------------------------------------------------------------


class PortionOf(NamedTuple):
    """The portion of that number; without `block`, or where the run ends, None where it is not there."""

    loader: int
    number: int
    block: bool = True


class Rested(NamedTuple):
    """There is data again: what the others have by now is read."""


FeedWait = PortionOf | Rested


class Portions:
    """One loader's portions: asked for ahead, taken in their order (M7). `rest` and `resting` are its learner's."""

    def __init__(
        self,
        number: int,
        post: Callable[..., None],
        rest: Callable[[int, int], None],
        resting: Callable[[], bool],
    ) -> None:
        self.number, self.epoch = number, 0
        self._post, self._rest, self._resting = post, rest, resting
        self._asking = say.AskBatch(number, 0)
        self.index = 0  # of the next portion to use
        self.asked = 0  # portions asked for
        self._started = False  # this iteration has asked for its first portion
        self.ended = False  # and has seen the epoch's last

    def welcome(self) -> Generator[FeedWait, Any, None]:
        """It has joined, or joined again: what came before is void, an older epoch may come again."""
        self.index = self.asked = 0
        self._started = self.ended = False
        first: Portion | None = yield PortionOf(self.number, OUTSIDE)
        self.epoch = first.epoch if first else self.epoch

    def leave(self) -> None:
        """The epoch is over for this learner."""
        self._started = self.ended = False
        self.epoch += 1

    def at_hand(self) -> bool:
        """The next may be there, and nothing need be done before it is taken."""
        return self._started and not self._resting()

    def next(self, ahead: int, *, block: bool) -> Generator[FeedWait, Any, Portion | None]:
        """The next portion of this epoch, with so many asked for; None: not there (or the run ends)."""
        begins, self._started = not self._started and self.index > 0, True
        if begins:  # a further epoch, for all at once: rest first, so that nobody waits meanwhile
            self._rest(self.number, self.index)
        self.ask(ahead)
        portion: Portion | None = None
        if not begins:
            portion = yield PortionOf(self.number, self.index, block=False)
        if portion is None and (begins or block):
            self._rest(self.number, self.index)
            self._post(say.Blocked(self.number, self.index))
            portion = yield PortionOf(self.number, self.index)
            if portion is not None:
                yield Rested()
        elif portion is not None and self._resting():  # since another loader's end
            self._rest(self.number, self.index)
            yield Rested()
        return self.seen(portion)

    def ask(self, ahead: int) -> None:
        if self.asked < self.index + ahead and self._asking.epoch != self.epoch:
            self._asking = say.AskBatch(self.number, self.epoch)
        while self.asked < self.index + ahead:
            self._post(self._asking, later=True)
            self.asked += 1

    def seen(self, portion: Portion | None) -> Portion | None:
        if portion is not None:
            self.index += 1
            if portion.end:
                self.asked = self.index
                self.ended = True
        return portion

"""The leading shard's ledgers: what learners say about their data goes in, the ledgers' decisions to the leader.

Also who has got how many portions, and who rests until one comes. Nothing is decided here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from syncline import messages as m
from syncline.messages.to_leader import AskBatch, Blocked, CloseLoader, StreamEnded
from syncline.ports import OUTSIDE, Portion, ServerPort
from syncline.protocols.epoch_positions import Decision, Standing
from syncline.protocols.ledger import Ledger
from syncline.protocols.meetings import EPOCH, MeetingPlace
from syncline.protocols.streams import StreamEpochs


class DataDispatcher:
    """All loaders of a run; `decided(loader, decisions)` has them carried out."""

    def __init__(
        self, port: ServerPort, ranks: Mapping[int, int], decided: Callable[[int, list[Decision]], None]
    ) -> None:
        self._port, self._ranks, self._decided = port, ranks, decided
        self._ledgers: dict[int, Ledger | StreamEpochs] = {}
        self.evaluated: set[int] = set()  # loaders whose epochs end with a snapshot
        self._granted: dict[tuple[int, int], int] = defaultdict(int)  # (loader, learner) -> portions given
        self._resting: dict[int, int] = {}  # learner -> loader it waits for
        self._late: dict[int, list[int]] = defaultdict(list)  # loaders that wait for the warm start's end
        self._gone: set[int] = set()
        self._epochs: dict[int, int] = {}  # learner -> the epoch of its last batches of the first loader

    # -- who is there ------------------------------------------------------------------------------------

    def make_loader(self, make: m.MakeLoader, *, lockstep: bool) -> None:
        opened = make.opened
        if opened.policy == m.STREAM:
            self._ledgers[opened.loader] = StreamEpochs(lockstep=lockstep, standing=make.standing)
        else:
            self._ledgers[opened.loader] = Ledger(
                size=opened.size,
                batch_size=opened.batch_size,
                epochs=opened.epochs,
                lockstep=lockstep,
                partition=opened.policy == "partition",
                learners=make.parts,
                standing=make.standing,
            )
        if make.snapshot:
            self.evaluated.add(opened.loader)

    def join(self, loader: int, learner: int, *, later: bool) -> None:
        """Later: nobody counts on it before the warm start is over."""
        if later:
            self._late[learner].append(loader)
        else:
            self._welcome(loader, learner)

    def welcome_late(self, learner: int) -> None:
        """It has read its first version."""
        for loader in self._late.pop(learner, ()) if self._late else ():
            self._welcome(loader, learner)

    def _welcome(self, loader: int, learner: int) -> None:
        ledger = self._ledgers[loader]
        first = self._ledgers.get(0) if loader else None
        cycle = first.epoch(learner) if first is not None and learner in first else 0
        self._decided(loader, ledger.join(learner, self._ranks[learner], cycle))
        self._port.grant(learner, Portion(loader, OUTSIDE, ledger.epoch(learner), 0, 0))

    def going(self, learner: int) -> tuple[int, int]:
        """A learner leaves: (positions that come back, those in gradients not yet folded)."""
        self._resting.pop(learner, None)
        self._late.pop(learner, None)
        self._gone.add(learner)
        held = [ledger.holds(learner) for ledger in self._ledgers.values()]
        return sum(a for a, _ in held), sum(b for _, b in held)

    def leave(self, learner: int, *, lost: bool) -> None:
        for loader, ledger in self._ledgers.items():
            if isinstance(ledger, StreamEpochs):
                self._decided(loader, ledger.leave(learner, lost=lost))
            else:
                self._decided(loader, ledger.leave(learner))

    def change(self, *, lockstep: bool) -> None:
        for loader, ledger in self._ledgers.items():
            self._decided(loader, ledger.change(lockstep=lockstep))

    # -- what they say -----------------------------------------------------------------------------------

    def ask(self, learner: int, ask: AskBatch) -> None:
        self._decided(ask.loader, self._ledgers[ask.loader].ask(learner, ask.epoch))

    def block(self, learner: int, blocked: Blocked) -> None:
        self._decided(blocked.loader, self._ledgers[blocked.loader].block(learner, blocked.index))

    def close(self, learner: int, close: CloseLoader) -> None:
        loader = close.loader
        decisions = self._ledgers[loader].close(learner, close.upto)
        self._port.grant(learner, Portion(loader, OUTSIDE, 0, self._granted[loader, learner], 0, 1))
        self._decided(loader, decisions)

    def ended(self, learner: int, ended: StreamEnded) -> None:
        self._decided(ended.loader, self._ledgers[ended.loader].close(learner, ended.upto))

    def rest(self, loader: int, learner: int, upto: int) -> bool:
        """Nothing to do until a portion comes; False where one is on its way already."""
        if self._granted[loader, learner] > upto:
            self._resting.pop(learner, None)
            return False
        self._resting[learner] = loader
        return True

    def met(self, learners: Iterable[int]) -> None:
        """They rest no more."""
        for learner in learners:
            self._resting.pop(learner, None)

    def taken(self, learner: int, usage: list[tuple[int, int]]) -> None:
        """A gradient of these batches was taken: (loader, upto) each."""
        if learner not in self._gone:
            for loader, upto in usage:
                self._decided(loader, self._ledgers[loader].taken(learner, upto))

    def settled(self, learner: int, usage: list[tuple[int, int]]) -> dict[int, int]:
        """Folded. Of which epochs of the first loader its batches are, and how many examples.

        A gradient without batches of its own (of a second table, say) belongs where its learner's last ones do.
        """
        first, found = self._ledgers.get(0), dict[int, int]()
        for loader, upto in usage:
            if loader == 0:
                found = self._ledgers[0].epochs(learner, upto)
        if found:
            self._epochs[learner] = max(found)
        else:
            found[first.not_done(self._epochs.get(learner, 0)) if first is not None else 0] = 1
        for loader, upto in usage:
            self._decided(loader, self._ledgers[loader].settled(learner, upto))
        return found

    def dropped(
        self, learner: int, usage: list[tuple[int, int]], before: Sequence[list[tuple[int, int]]]
    ) -> None:
        """In no update; gradients of the usages `before` may come into one yet."""
        for loader, upto in usage:
            since = max((until for each in before for at, until in each if at == loader), default=0)
            self._decided(loader, self._ledgers[loader].settled(learner, upto, since))

    def done(self, loader: int) -> int:
        """Epochs that are done, in order."""
        return self._ledgers[loader].done

    # -- what comes of it --------------------------------------------------------------------------------

    def grant(self, portion: Portion, learner: int) -> bool:
        """A portion goes out; True if its learner has rested until now."""
        self._granted[portion.loader, learner] = portion.number + 1
        self._port.grant(learner, portion)
        if self._resting.get(learner) != portion.loader:
            return False
        del self._resting[learner]
        return True

    def untangle(self, elsewhere: Collection[int] = ()) -> None:
        """Nobody waits for ever: where all wait at barriers, but of different loaders, or elsewhere, the last loader's gives way.

        Learners get out of step when one joins, or goes back to a checkpoint, in the middle of loops over several loaders.
        """
        if len(self._ledgers) < 2 and not elsewhere:
            return
        stuck = {loader: ledger.stuck() for loader, ledger in self._ledgers.items()}
        live, waiting = self._ranks.keys() - self._gone, set[int]().union(*stuck.values())
        if live and waiting and not live - waiting - set(elsewhere):
            last = max(loader for loader, learners in stuck.items() if learners)
            self._decided(last, self._ledgers[last].part_ways())

    def waiting(self) -> dict[int, MeetingPlace]:
        """Learners that do nothing until others go on, and where."""
        return {
            learner: MeetingPlace(EPOCH, loader)
            for loader, ledger in self._ledgers.items()
            for learner in ledger.waiting()
        }

    def standings(self) -> dict[int, Standing]:
        return {loader: ledger.standing() for loader, ledger in self._ledgers.items()}

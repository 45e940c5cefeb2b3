"""An account of one loader of its own: where every position of every epoch is (M7).

Every position is free, out with one learner, in one gradient, or settled, and settled once. Knows nothing of how the
ledger decides; a decision that cannot be is a `Broken`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from syncline.protocols.epoch_positions import Standing

Span = tuple[int, int, int]  # epoch, start, stop
FREE, OUT, SETTLED = 0, 1, 2
WORDS = {FREE: "free", OUT: "out", SETTLED: "settled"}


class Broken(Exception):
    """Something that always holds does not."""


class Counted:
    """The answers that learners of one loader get."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}  # learner -> grants and ends so far

    def ended(self, learner: int, index: int) -> None:
        """Every answer comes once, in order."""
        if index != self.given.get(learner, 0):
            raise Broken(
                f"learner {learner} gets answer {index}, after {self.given.get(learner, 0)} of them: one is missing or twice"
            )
        self.given[learner] = index + 1


class FeedAccount(Counted):
    """Positions of one loader."""

    def __init__(self, size: int, epochs: int | None, standing: Standing | None) -> None:
        super().__init__()
        self.size, self.epochs = size, epochs
        self.done = standing.done if standing else 0  # epochs, in order
        self._early: set[int] = set()  # done before an earlier one
        self._touched: set[int] = set()  # epochs of which something was settled
        self._states: dict[int, bytearray] = {}
        self._skipped = dict(standing.skipped) if standing else {}  # before the checkpoint: settled, here
        self._out: dict[int, dict[int, Span]] = {}  # learner -> index -> granted, in no gradient
        # somebody left a loop early: leftovers may be skipped
        self._broken = bool(standing and standing.broken)
        if standing is None:
            return
        self._early = set(range(self.done, standing.newest + 1)) - standing.fresh.keys()
        for epoch, owners in standing.fresh.items():
            state = self._states[epoch] = bytearray([SETTLED]) * self.size
            for start, stop in owners.values():
                state[start:stop] = bytes(stop - start)
        for epoch, start, stop in standing.returned:
            self._states[epoch][start:stop] = bytes(stop - start)

    def _set(self, spans: Iterable[Span], before: int, after: int, what: str) -> None:
        for epoch, start, stop in spans:
            if self._is_done(epoch):
                raise Broken(f"{what}: positions {start}…{stop - 1} of epoch {epoch}, which is done")
            state = self._states.setdefault(epoch, bytearray(self.size))
            if not 0 <= start < stop <= self.size:
                raise Broken(f"{what}: positions {start}…{stop - 1} of {self.size}")
            wrong = [at for at in range(start, stop) if state[at] != before]
            if wrong:
                raise Broken(
                    f"{what}: position {wrong[0]} of epoch {epoch} is {WORDS[state[wrong[0]]]}, not {WORDS[before]}"
                )
            state[start:stop] = bytes([after]) * (stop - start)

    def _is_done(self, epoch: int) -> bool:
        return epoch < self.done or epoch in self._early

    def granted(self, learner: int, index: int, span: Span) -> None:
        """Handed out: nobody else may have it, and it may not be in an update already."""
        self.ended(learner, index)
        self._set([span], FREE, OUT, f"handed out to learner {learner}")
        self._out.setdefault(learner, {})[index] = span

    def used(self, learner: int, upto: int) -> list[Span]:
        """What goes into the gradient that it publishes."""
        out = self._out.get(learner, {})
        return [out.pop(index) for index in sorted(out) if index < upto]

    def settled(self, spans: Sequence[Span], what: str) -> None:
        self._set(spans, OUT, SETTLED, what)
        self._touched.update(epoch for epoch, _, _ in spans)

    def back(self, spans: Iterable[Span], what: str) -> None:
        self._set(spans, OUT, FREE, what)

    def closed(self, learner: int, upto: int) -> None:
        """It left its loop: what it has not read comes back."""
        self._broken = True
        out = self._out.get(learner, {})
        self.back([out.pop(index) for index in sorted(out) if index >= upto], f"left by learner {learner}")

    def left(self, learner: int) -> None:
        """All that it has not published comes back."""
        self.back(self._out.pop(learner, {}).values(), f"lost with learner {learner}")
        self.given.pop(learner, None)

    def epoch_done(self, epoch: int, skipped: int) -> None:
        if self._is_done(epoch):
            raise Broken(f"epoch {epoch} is said to be done, and was done before")
        state = self._states.pop(epoch, bytearray(self.size))
        free, out = state.count(FREE) + self._skipped.get(epoch, 0), state.count(OUT)
        if out or free != skipped:
            raise Broken(
                f"epoch {epoch} is said to be done with {skipped} examples skipped: {free} were never in an update, "
                f"{out} are in gradients that are not folded"
            )
        if skipped and not self._broken:
            raise Broken(f"epoch {epoch} skips {skipped} examples, and nobody left its loop")
        self._early.add(epoch)
        while self.done in self._early:
            self._early.remove(self.done)
            self.done += 1

    def due(self) -> None:
        """An event is over: all that could be said to be done was."""
        for epoch in self._touched & self._states.keys():
            if self._states[epoch].count(SETTLED) == self.size:
                raise Broken(f"all of epoch {epoch} is settled, and it is not said to be done")
        self._touched.clear()

    def compare(self, standing: Standing) -> None:
        """Nothing that is not settled has fallen under the table."""
        for epoch, owners in standing.fresh.items():
            theirs = sum(stop - start for start, stop in owners.values())
            theirs += sum(stop - start for each, start, stop in standing.returned if each == epoch)
            settled = self._states.get(epoch, bytearray(self.size)).count(SETTLED)
            mine = self.size - settled - standing.skipped[epoch] + self._skipped.get(epoch, 0)
            if theirs != mine:
                raise Broken(
                    f"of epoch {epoch} {mine} examples are not settled, the ledger knows of {theirs}"
                )

    def complete(self) -> None:
        """The end of a run that was not stopped."""
        if self.epochs is not None and self.done < self.epochs:
            state = self._states.get(self.done, bytearray(self.size))
            raise Broken(
                f"the run is over, but only {self.done} of {self.epochs} epochs are done; of epoch {self.done} "
                f"{state.count(FREE)} examples were never in an update, {state.count(OUT)} are out"
            )


class StreamAccount(Counted):
    """One loader over streams: which batches of which epochs are in no update, and who is in which epoch."""

    def __init__(self, epochs: int | None, standing: Standing | None) -> None:
        super().__init__()
        self.epochs, self.done = epochs, standing.done if standing else 0
        self._epoch: dict[int, int] = {}  # of each learner that is in one
        self._read: dict[int, int] = {}  # learner -> its batches that are in gradients
        self._ends: dict[int, list[tuple[int, int]]] = {}  # learner -> (epoch, its batches up to there)
        self._open: dict[Span, int] = {}  # in gradients that are in no update, with how many

    def granted(self, learner: int, index: int, span: Span) -> None:
        """An epoch begins for it."""
        self.ended(learner, index)
        if span[0] < self.done:
            raise Broken(f"learner {learner} begins epoch {span[0]}, which is done")
        self._epoch[learner] = span[0]

    def closed(self, learner: int, upto: int) -> None:
        """Its epoch ends with that batch."""
        if (epoch := self._epoch.pop(learner, None)) is not None:
            self._ends.setdefault(learner, []).append((epoch, upto))

    def used(self, learner: int, upto: int) -> list[Span]:
        """Batches that go into a gradient, with the first epoch that they are of."""
        start = self._read.get(learner, 0)
        self._read[learner] = max(start, upto)
        ended = [epoch for epoch, end in self._ends.get(learner, []) if end > start]
        span = (min([*ended, self._epoch.get(learner, self.done)]), start, upto)
        self._open[span] = self._open.get(span, 0) + 1
        return [span]

    def settled(self, spans: Iterable[Span], what: str) -> None:
        for span in spans:
            if not self._open.get(span):
                raise Broken(f"{what}: batches {span[1]}…{span[2] - 1} of epoch {span[0]} are settled twice")
            self._open[span] -= 1

    def back(self, spans: Iterable[Span], what: str) -> None:
        """Lost with their learner: nobody else can read them."""
        self.settled(spans, what)

    def left(self, learner: int) -> None:
        self._epoch.pop(learner, None)
        self.given.pop(learner, None)

    def epoch_done(self, epoch: int, skipped: int) -> None:
        if epoch != self.done:
            raise Broken(f"epoch {epoch} is said to be done, the next to be done is {self.done}")
        reading = [learner for learner, at in self._epoch.items() if at <= epoch]
        unsettled = [span for span, count in self._open.items() if count and span[0] <= epoch]
        if reading or unsettled:
            raise Broken(
                f"epoch {epoch} is said to be done, but {reading} read it, and {unsettled} are in no update"
            )
        self.done += 1

    def due(self) -> None:
        """Whether an epoch could be done already, only its learners know."""

    def compare(self, standing: Standing) -> None:
        if standing.done > self.done:
            raise Broken(f"{standing.done} epochs are said to be done, {self.done} are")

    def complete(self) -> None:
        """The end of a run that was not stopped."""
        if self.epochs is not None and self.done < self.epochs:
            raise Broken(f"the run is over, but only {self.done} of {self.epochs} epochs are done")

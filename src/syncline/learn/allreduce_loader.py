"""The feed of learners among equals: every learner computes by itself which examples are its own (M7, A5, A6).

While it computes on a repeated batch, backward makes zeros, so that what such a batch would add to an accumulated gradient is
nothing. Not responsible for the rule (protocols/allreduce.py) nor for the order of an epoch (learn/loader.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from syncline.errors import UsageError
from syncline.learn.batch_to_device import to_device
from syncline.learn.loader import LoaderBase, ReadingAhead
from syncline.protocols.allreduce import Rounds, Share, Spans, left_of, standing
from syncline.protocols.epoch_positions import Standing
from syncline.roles.checkpoint_manifest import LoaderState

if TYPE_CHECKING:
    from syncline.learn.allreduce_session import AllReduceSession


PATIENCE = 1000  # batches that are repeated while nobody steps


class AllReduceLoader(LoaderBase):
    """Batches of one data set; iterate once per epoch. It counts by itself how far it is."""

    _session: AllReduceSession

    def __init__(
        self,
        session: AllReduceSession,
        number: int,
        data: Dataset[Any],
        *,
        batches: Sequence[int],
        kept: LoaderState | None,
        **options: Any,
    ) -> None:
        super().__init__(session, number, data, batch_size=batches[session.rank], **options)
        self._batches = tuple(batches)
        self.epoch = kept.standing.done if kept is not None else 0  # of the next iteration
        self._given = 0  # rounds of this epoch
        self._settled = 0  # of them, in gradients
        self._halted: Standing | None = None  # where it stood when the run was to end
        self._left_at: Standing | None = None  # where it stood when its loop ended, until the next step
        self._begin(kept)

    def _begin(self, kept: LoaderState | None) -> None:
        """Where a run before was, or at the start."""
        self._rounds = self._whole = self._rounds_of(None)
        self._left: Spans | None = None  # of the epoch in which a run goes on
        if kept is not None:
            own, learners = self.policy == "partition", len(self._batches)
            self._left = left_of(
                kept.standing, size=self.size, learners=learners, parts=kept.parts, partition=own
            )

    def _rounds_of(self, left: Spans | None) -> Rounds:
        return Rounds(
            size=self.size,
            batches=self._batches,
            rank=self._session.rank,
            partition=self.policy == "partition",
            left=left,
        )

    def settle(self) -> None:
        """A step was taken: what was handed out is in gradients."""
        self._settled, self._left_at = self._given, None

    def standing(self) -> Standing:
        """What a checkpoint says of it: all that is in gradients is done."""
        if self._halted is not None:
            return self._halted
        left = self._left_over()
        return standing(self.epoch, left) if left is not None else Standing.before(self.epoch)

    def standing_at_failure(self) -> Standing:
        """Return where the loop stands that an exception has ended, or is about to end: Python closes iterators first."""
        return self._left_at or self.standing()

    def __len__(self) -> int:
        """Batches of an epoch that this loop sees, those that it repeats without weight included."""
        return self._whole.count

    def __iter__(self) -> Iterator[Any]:
        self._enter()
        session = self._session
        session.epoch_begins(self.number, self.epoch)
        self._rounds = self._rounds_of(self._left) if self._left is not None else self._whole
        self._left, self._left_at, self._given, self._settled = None, None, 0, 0
        source = self._source()
        try:
            while session.goes_on() and self._given < self._rounds.count:
                share, batch = next(source)
                self._given += 1
                session.consume(self.number, share.weight, more=self._given < self._rounds.count)
                if self._given == self._rounds.count:
                    session.epoch_given(self.number, self.epoch)
                yield batch
        finally:
            source.close()
            self._left_at = self.standing()
            if self._given < self._rounds.count:
                if session.ending:
                    self._halted = self.standing()
                else:
                    session.epoch_given(self.number, self.epoch)  # the loop was left early
            session.epoch_left()
            self._iterating = False
            self.epoch += 1

    def _left_over(self) -> Spans | None:
        """Of this epoch, where it is begun."""
        return self._rounds.after(self._settled) if self._iterating else self._left

    def _source(self) -> Generator[tuple[Share, Any]]:
        order = self._order(self.epoch, len(self._batches))
        shares = [self._rounds.share(number) for number in range(self._rounds.count)]

        def read(share: Share) -> Any:
            return self._read(order[share.start : share.stop])

        if not self.ahead or not self._session.reader:
            for share in shares:
                yield share, to_device(read(share), self._session.device)
            return
        reading, coming = ReadingAhead(read, self._copies, threaded=True), iter(shares)
        try:
            for share in islice(coming, self.ahead + 1):
                reading.want(share)
            for share in shares:
                _, batch, error = reading.get()
                if error is not None:
                    raise error
                if (following := next(coming, None)) is not None:
                    reading.want(following)
                yield share, batch
        finally:
            reading.close()


class AllReduceSplitLoader(AllReduceLoader):
    """An iterable data set, split by rank: every learner keeps its own share of the stream.

    Who comes to its end first repeats its last batch with weight zero until all have: only then the epoch ends. Where
    gradients are switched off nobody steps, and everybody comes to its own end.
    """

    def _begin(self, kept: LoaderState | None) -> None:
        self._skip, learners = 0, len(self._batches)  # rounds that a run before has had of this epoch
        if kept is not None and (spans := kept.standing.fresh.get(self.epoch, {})):
            if kept.parts != learners:
                raise UsageError(
                    f"the stream of loader {self.number} was left in the middle of epoch {self.epoch + 1} by {kept.parts} learners and "
                    f"cannot go on with {learners}, who split it otherwise; resume with learners={kept.parts}"
                )
            self._skip = spans[0][0]

    def _left_over(self) -> Spans | None:
        """As one span, from the first round that is in no gradient."""
        rounds = self._settled if self._iterating else self._skip
        return ((rounds, rounds + 1),) if rounds else None

    def __len__(self) -> int:
        raise TypeError("nobody knows how many batches an iterable data set has")

    def __iter__(self) -> Iterator[Any]:
        self._iterating = True
        try:
            yield from self._epoch()
        finally:
            if self._iterating:
                self._left_at = self.standing()
                self._halted = self._left_at if self._session.ending else self._halted
            self._iterating = False
            self._session.epoch_left()

    def _first(self, batches: Iterator[list[Any]]) -> tuple[Any, Any]:
        """The last batch that a run before has had of this epoch, and the first that it had not."""
        held, following = None, next(batches, None)
        if following is None:
            session = self._session
            raise UsageError(
                f"learner {session.rank} of {session.learners} has no example of this iterable data set: it is too short"
            )
        for _ in range(self._skip):
            if following is not None:
                held, following = following, next(batches, None)
        self._given = self._settled = self._skip
        self._skip = 0
        return held, following

    def _epoch(self) -> Iterator[Any]:
        session, gather = self._session, self.collate or default_collate
        more = True
        own = islice(self.data, session.rank, None, session.learners)  # type: ignore[call-overload]
        batches = iter(lambda: list(islice(own, self.batch_size)), [])
        session.epoch_begins(self.number, self.epoch)
        held, following = self._first(batches)
        idle, steps = 0, session.iterations
        while more and session.goes_on():
            repeated = following is None
            if repeated:
                if not torch.is_grad_enabled():
                    break
                idle, steps = (idle + 1 if steps == session.iterations else 0), session.iterations
                self._refuse_endless(idle)
            else:
                held, following = following, next(batches, None)
            self._given += 1
            session.consume(self.number, 0 if repeated else len(held), more=following is not None)
            yield to_device(gather(list(held)), session.device)
            more = session.more_anywhere
        if session.ending and more:
            self._halted = self.standing()
        self._iterating = False
        session.epoch_given(self.number, self.epoch)
        self.epoch += 1

    def _refuse_endless(self, idle: int) -> None:
        if idle > PATIENCE:
            raise UsageError(
                f"loader {self.number}: learner {self._session.rank} has repeated its last batch {PATIENCE} times without a "
                "step; only steps tell it that the others have come to their end. Step in the loop, or evaluate under "
                "torch.no_grad(), where everybody comes to its own end"
            )


class ZeroGradients:
    """The parameters of one learner's tables, and whether they are silent. There are hooks only while they are."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._handles: list[Any] = []
        self._fresh: int | None = None  # the loader of the last batch that counts

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters += parameters

    def handed_out(self, loader: int, *, repeated: bool) -> None:
        """A batch goes to the loop. A repeated one beside another loader's new one belongs to a gradient that counts."""
        silent = repeated and self._fresh in (None, loader)
        if not repeated:
            self._fresh = loader
        elif silent:
            self._fresh = None
        self._set(silent)

    def end(self) -> None:
        """No batch is being computed on."""
        self._set(False)

    def _set(self, silent: bool) -> None:
        for handle in self._handles:
            handle.remove()
        able = [parameter for parameter in self._parameters if silent and parameter.requires_grad]
        self._handles = [parameter.register_hook(torch.zeros_like) for parameter in able]

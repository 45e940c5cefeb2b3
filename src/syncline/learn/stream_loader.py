"""The loader of an iterable data set with servers (M7): every learner reads a share of its own, each λ-th example.

Responsible for saying with the last gradient of an epoch that it is the last, so that the epoch ends with the version that
folds it. Not responsible for when an epoch begins, or is over for all (protocols/streams.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, default_collate

from syncline import messages as m
from syncline.errors import UsageError
from syncline.learn.batches import to_device
from syncline.learn.loader import Loader
from syncline.messages.to_leader import StreamEnded
from syncline.ports import Portion
from syncline.protocols.streams import NEVER

if TYPE_CHECKING:
    from syncline.learn.server_session import ServerSession


class StreamLoader(Loader):
    """Batches of this learner's share; iterate once per epoch."""

    def __init__(
        self,
        session: ServerSession,
        number: int,
        data: IterableDataset[Any],
        *,
        batch_size: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._collate = collate or default_collate
        self._items: Share | None = None  # while it is iterated
        self._given = 0  # batches
        self._told = False  # the leading shard knows that the epoch ends here
        super().__init__(
            session,
            number,
            data,
            batch_size=batch_size,
            policy=m.STREAM,
            collate=collate,
            ahead=0,
            parts=1,
        )

    def __len__(self) -> int:
        raise TypeError("nobody knows how many batches an iterable data set has")

    def __iter__(self) -> Iterator[Any]:
        self._enter()
        try:
            begun = -1
            while begun != self.generation and self._begins():  # again, where the servers are new ones
                begun = self.generation
                for items in self._batches():
                    self._given += 1
                    self._session.consumed(self.number, self._given, len(items))
                    yield to_device(self._collate(items), self._session.device)
        finally:
            self._leave()
            self._items = None
            self._iterating = False

    def _begins(self) -> bool:
        """The epoch, in lockstep for all at once; False where it is over already, or the run ends."""
        portion: Portion | None = self._next(block=True)
        if portion is None or (portion.end and portion.epoch != NEVER):
            return False
        if portion.end:
            raise UsageError(
                f"loader {self.number}: no learner that is left finds an example in its share of the iterable data set"
            )
        self._items, self._told = Share(self.data, self._session.rank, self._session.learners), False
        return True

    def _batches(self) -> Iterator[list[Any]]:
        share, generation = self._items, self.generation
        assert share is not None
        while generation == self.generation and (items := list(islice(share, self.batch_size))):
            if self._session.ending:
                return
            yield items

    def look_ahead(self) -> None:
        """Here, and not before: until now the loop has drawn from the random generators, from here on the stream does."""
        if self._items is not None and self._items.ends():
            self._tell_end()

    def _tell_end(self) -> None:
        if not self._told:
            self._told = True
            self._session.port.post(StreamEnded(self.number, self._given))

    # -- as `Loader` -------------------------------------------------------------------------------------

    def rejoin(self) -> None:
        self._given = 0
        super().rejoin()

    def _wanted(self) -> int:
        return 1

    def _leave(self) -> None:
        self._session.push()
        generation, over = self.generation, self._items is not None and self._items.over
        if self._items is not None and (over or not self._session.ending):
            self._session.insist(self._tell_end)
            if generation != self.generation:
                return
            self._session.ended(self.number, self._portion.index)
        self._portion.leave()


class Share:
    """Every λ-th example of a data set, of which the next may be looked at."""

    def __init__(self, data: Any, rank: int, learners: int) -> None:
        self._items = _nth(data, rank, learners)
        self._next: list[Any] = []
        self._error: BaseException | None = None
        self.over = False

    def ends(self) -> bool:
        """There is no further one; what fails here fails when that is asked for."""
        if not self._next and not self.over and self._error is None:
            try:
                self._next = [next(self)]
            except StopIteration:
                pass
            except Exception as error:
                self._error = error
        return self.over

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        if self._next:
            return self._next.pop()
        try:
            return next(self._items)
        except StopIteration:
            self.over = True
            raise


def _nth(data: Any, rank: int, learners: int) -> Iterator[Any]:
    index = -1
    for index, item in enumerate(data):
        if index % learners == rank:
            yield item
    if index < 0:
        raise UsageError(
            "the iterable data set gave no example: its __iter__ must begin anew each time it is called, once for every epoch"
        )

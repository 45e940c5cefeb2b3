"""The feed: which examples a learner gets, and reading them ahead of the computation (M7, R5).

`epoch_order` is the published rule, so that a run can be repeated in plain PyTorch. `Loader` turns portions of it into batches; of an
iterable data set (`StreamLoader`) every learner reads a share of its own, each λ-th example, and says with the last gradient of an
epoch that it is the last, so that the epoch ends with the version that folds it. Not responsible for who gets which portion, nor for
when an epoch begins or is over for all: protocols decide that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Hashable, Iterator
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from syncline.errors import UsageError
from syncline.learn.batch_to_device import CopyStream, rows_of, to_device
from syncline.learn.model_factories import CPU
from syncline.learn.stepper import FeedWait, Portions, Rested
from syncline.messages.to_leader import CloseLoader, StreamEnded
from syncline.ports import OUTSIDE, Portion
from syncline.protocols.streams import NEVER

if TYPE_CHECKING:
    from syncline.learn.server_session import ServerSession


POLICIES = ("ledger", "partition", "sample")
# Portions asked for ahead of the one in use; of those that are read ahead, as many more at most: an engine has room for
# hundreds, and many loaders may be read at once.
AHEAD = 2


def epoch_order(size: int, *, seed: int, epoch: int, policy: str = "ledger", parts: int = 1) -> Tensor:
    """The order of an epoch's examples: positions of the ledger to indices of the data set."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    if policy == "sample":
        return torch.randint(size, (size,), generator=generator)
    if policy == "ledger":
        return torch.randperm(size, generator=generator)
    own = torch.randperm(size, generator=torch.Generator().manual_seed(seed))  # the same subsets every epoch
    pieces = []
    for part in range(parts):
        low, high = part * size // parts, (part + 1) * size // parts
        pieces.append(own[low:high][torch.randperm(high - low, generator=generator)])
    return torch.cat(pieces)


def read_ahead(data: Dataset[Any], ahead: int | None = None, device: torch.device = CPU) -> int:
    """How many batches a thread reads before they are needed: as the user says, else none of tensors that lie on the device."""
    if ahead is not None:
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise UsageError(
                f"ahead must be a whole number of at least 0, the batches that are read before they are needed, got {ahead!r}"
            )
        return ahead
    there = isinstance(data, TensorDataset) and all(each.device.type == device.type for each in data.tensors)
    return 0 if there else AHEAD


def reader(
    data: Dataset[Any], collate: Callable[[list[Any]], Any] | None, *, pinned: bool = False
) -> Callable[[Tensor], Any]:
    """Indices to a batch; `pinned`: rather where a GPU copies from."""
    if isinstance(data, TensorDataset) and collate is None:
        tensors = data.tensors
        return lambda indices: [rows_of(tensor, indices, pinned=pinned) for tensor in tensors]
    gather = collate or default_collate
    several = getattr(data, "__getitems__", None)  # torch's own optional protocol of data sets
    if several is not None:
        return lambda indices: gather(several(indices.tolist()))
    return lambda indices: gather([data[index] for index in indices.tolist()])


def identity(function: Any) -> Hashable:
    """The same for functions of one piece of code that have captured the same objects, such as a lambda in a loop."""
    if isinstance(function, partial):
        named = tuple(sorted((name, id(value)) for name, value in function.keywords.items()))
        return identity(function.func), tuple(map(id, function.args)), named
    if isinstance(function, MethodType):
        return id(function.__self__), identity(function.__func__)
    if isinstance(function, FunctionType):
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        captured = (*(function.__closure__ or ()), *defaults)
        return id(function.__code__), tuple(id(_content(each)) for each in captured)
    return id(function)


def _content(captured: Any) -> Any:
    try:
        return captured.cell_contents if isinstance(captured, CellType) else captured
    except ValueError:  # a variable that has no value yet
        return None


class ReadingAhead:
    """Batches in the order in which they are wanted, read and copied to a GPU before they are needed: by a thread, or without
    one, where everything must happen in one order, when they are fetched."""

    def __init__(self, read: Callable[[Any], Any], copies: CopyStream | None, *, threaded: bool) -> None:
        self._read, self._copies = read, copies
        self._wanted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, Any, BaseException | None]] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._reading, daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def want(self, portion: Any) -> None:
        self._wanted.put(portion)

    def get(self) -> tuple[Any, Any, BaseException | None]:
        """The next that was wanted, its batch, or why there is none."""
        if self._thread is None:
            self._read_one(self._wanted.get())
        portion, batch, error = self._done.get()
        if self._copies is not None and error is None:
            batch = self._copies.use(batch)
        return portion, batch, error

    def close(self) -> None:
        self._closed = True
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join()

    def _reading(self) -> None:
        while (portion := self._wanted.get()) is not None and not self._closed:
            self._read_one(portion)

    def _read_one(self, portion: Any) -> None:
        try:
            batch = self._read(portion)
            self._done.put((portion, batch if self._copies is None else self._copies.begin(batch), None))
        except BaseException as error:
            self._done.put((portion, None, error))


class LoaderBase:
    """Of all topologies: what is read, and how."""

    def __init__(
        self,
        session: Any,
        number: int,
        data: Dataset[Any],
        *,
        batch_size: int,
        policy: str,
        collate: Callable[[list[Any]], Any] | None,
        ahead: int,
    ) -> None:
        self._session = session
        self.number, self.batch_size, self.policy = number, batch_size, policy
        self.data, self.collate = data, collate  # kept: the session knows its loaders by their identity
        self.ahead = ahead  # in force from the next epoch on
        self.size = -1 if isinstance(data, IterableDataset) else len(data)  # type: ignore[arg-type]
        on_gpu = session.device.type == "cuda"
        self._copies = CopyStream(session.device) if on_gpu else None
        self._read = reader(data, collate, pinned=on_gpu)
        self._lies = data.tensors[0].device if isinstance(data, TensorDataset) else CPU
        self._iterating = False

    def _enter(self) -> None:
        if self._iterating:
            raise UsageError(f"loader {self.number} is being iterated already: one loop at a time")
        self._iterating = True

    def _order(self, epoch: int, parts: int) -> Tensor:
        seed = self._session.plan.seed
        order = epoch_order(self.size, seed=seed, epoch=epoch, policy=self.policy, parts=parts)
        return order.to(self._lies)


class Loader(LoaderBase):
    """Batches of one data set; iterate once per epoch."""

    _session: ServerSession

    def __init__(
        self, session: ServerSession, number: int, data: Dataset[Any], *, parts: int, **options: Any
    ) -> None:
        super().__init__(session, number, data, **options)
        self.generation = 0  # counts the servers it had to do with
        self._parts = parts
        self._orders: dict[int, Tensor] = {}
        self._portion = Portions(number, session.port.post, session.wait_for_data, lambda: session.resting)
        self._drive(self._portion.welcome())

    @property
    def epoch(self) -> int:
        """Return the epoch of the next iteration, counted from 0."""
        return self._portion.epoch

    def _drive(self, steps: Generator[FeedWait, Any, Any]) -> Any:
        """Block for what they wait for."""
        found: Portion | None = None
        while True:
            try:
                wait = steps.send(found)
            except StopIteration as done:
                return done.value
            found = None
            if isinstance(wait, Rested):
                self._session.rested()
            else:
                found = self._session.port.portion(wait.loader, wait.number, block=wait.block)

    def rejoin(self) -> None:
        """The servers are new ones: what they handed out is void, an older epoch may come again."""
        self.generation += 1
        self._drive(self._portion.welcome())

    def __len__(self) -> int:
        """Batches of an epoch that one loop sees: exact in lockstep, elsewhere the mean over the learners."""
        return -(-self.size // (self.batch_size * self._session.learners))

    def __iter__(self) -> Iterator[Any]:
        self._enter()
        self._session.restore_random()
        try:
            yield from self._batches()
        finally:
            self._leave()
            self._iterating = False

    def _batches(self) -> Iterator[Any]:
        """An epoch's; each is in the next gradient from the moment in which it is handed out."""
        return self._read_ahead() if self.ahead else self._read_now()

    def look_ahead(self) -> None:
        """A gradient of its batches is about to be published."""

    def _batch(self, portion: Portion) -> Any:
        order = self._orders.get(portion.epoch)
        if order is None:
            self._orders = {epoch: kept for epoch, kept in self._orders.items() if epoch >= portion.epoch - 1}
            order = self._orders[portion.epoch] = self._order(portion.epoch, self._parts)
        return self._read(order[portion.start : portion.stop])

    # -- portions ----------------------------------------------------------------------------------------

    def _wanted(self) -> int:
        """How many portions are asked for ahead."""
        return AHEAD + min(self.ahead, AHEAD)

    def _next(self, *, block: bool) -> Portion | None:
        """The next portion of this epoch; None: not there (or the run ends)."""
        return self._session.insist(lambda: self._drive(self._portion.next(self._wanted(), block=block)))

    def _read_now(self) -> Iterator[Any]:
        session = self._session
        while session.goes_on():
            portion = self._next(block=True)
            if portion is None:
                continue  # the run ends
            if portion.end:
                return
            batch = to_device(self._batch(portion), session.device)
            session.consumed(self.number, portion.number + 1, portion.stop - portion.start)
            yield batch

    def _read_ahead(self) -> Iterator[Any]:
        """A thread reads and collates; this one asks for portions and hands batches out."""
        reading = ReadingAhead(
            lambda wanted: self._batch(wanted[1]), self._copies, threaded=self._session.reader
        )
        waiting, more, generation = 0, True, self.generation
        try:
            while True:
                if generation != self.generation:  # new servers: there is more again
                    more, generation = True, self.generation
                while more and waiting <= self.ahead and self._session.goes_on():
                    portion = self._next(block=waiting == 0)
                    generation = self.generation
                    if portion is None and waiting == 0:
                        continue  # the run ends
                    if portion is None:
                        break
                    more = not portion.end
                    if more:
                        reading.want((generation, portion))
                        waiting += 1
                if waiting == 0:
                    return
                (begun, portion), batch, error = reading.get()
                waiting -= 1
                if begun == self.generation:
                    if error is not None:
                        raise error
                    self._session.consumed(self.number, portion.number + 1, portion.stop - portion.start)
                    yield batch
        finally:
            reading.close()

    def _leave(self) -> None:
        """The epoch is over for this learner, by its end or by leaving the loop."""
        self._session.push()
        generation = self.generation
        if not self._portion.ended and not self._session.ending:
            self._session.insist(self._break)
            if generation != self.generation:  # the epoch that new servers gave is not this one
                return
        elif self._portion.ended:
            self._session.ended(self.number, self._portion.index)
        self._portion.leave()

    def _break(self) -> None:
        """Portions on their way when the loop was left go unused; the answer to CLOSE says how many came."""
        port = self._session.port
        port.post(CloseLoader(self.number, self._session.used.get(self.number, 0)))
        answer = port.portion(self.number, OUTSIDE, block=True)
        if answer is not None:
            for index in range(self._portion.index, answer.start):
                port.portion(self.number, index, block=False)
            self._portion.index = self._portion.asked = answer.start


class StreamLoader(Loader):
    """Batches of this learner's share of an iterable data set; iterate once per epoch."""

    _items: Share | None = None  # while it is iterated
    _given = 0  # batches
    _told = False  # the leading shard knows that the epoch ends here

    def __len__(self) -> int:
        raise TypeError("nobody knows how many batches an iterable data set has")

    def _batches(self) -> Iterator[Any]:
        gather = self.collate or default_collate
        session, begun = self._session, -1
        while begun != self.generation:  # again, where the servers are new ones
            portion: Portion | None = self._next(block=True)  # the epoch, in lockstep for all at once
            if portion is None and session.goes_on():
                continue
            if portion is None or (portion.end and portion.epoch != NEVER):
                return  # it is over already, or the run ends
            if portion.end:
                raise UsageError(
                    f"loader {self.number}: no learner that is left finds an example in its share of the iterable data set"
                )
            begun, self._told = self.generation, False
            self._items = Share(self.data, session.rank, session.learners)
            while begun == self.generation and (items := list(islice(self._items, self.batch_size))):
                if not session.goes_on():
                    return
                self._given += 1
                session.consumed(self.number, self._given, len(items))
                yield to_device(gather(items), session.device)

    def look_ahead(self) -> None:
        """Here, and not before: until now the loop has drawn from the random generators, from here on the stream does."""
        if self._items is not None and self._items.ends():
            self._tell_end()

    def _tell_end(self) -> None:
        if not self._told:
            self._told = True
            self._session.port.post(StreamEnded(self.number, self._given))

    def rejoin(self) -> None:
        self._given = 0
        super().rejoin()

    def _wanted(self) -> int:
        return 1

    def _leave(self) -> None:
        self._session.push()
        items, self._items, generation = self._items, None, self.generation
        if items is not None and (items.over or not self._session.ending):
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
                self._next = list(islice(self, 1))
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
    """It holds no share: what the data set has open is closed when the share is let go of."""
    index = -1
    for index, item in enumerate(data):
        if index % learners == rank:
            yield item
    if index < 0:
        raise UsageError(
            "the iterable data set gave no example: its __iter__ must begin anew each time it is called, once for every epoch"
        )

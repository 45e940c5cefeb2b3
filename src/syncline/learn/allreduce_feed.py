"""The feed of learners among equals: every learner computes by itself which examples are its own (M7, A5, A6).

While it computes on a repeated batch, backward makes zeros, so that what such a batch would add to an accumulated gradient is
nothing. Not responsible for the rule (protocols/allreduce.py) nor for the order of an epoch (learn/loader.py).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from syncline.errors import UsageError
from syncline.learn.batches import CopyStream, to_device
from syncline.learn.loader import epoch_order, reader
from syncline.protocols.allreduce import Rounds, Share, Spans, left_of, standing
from syncline.protocols.epoch_positions import Standing
from syncline.roles.checkpoint_manifest import LoaderState

if TYPE_CHECKING:
    from syncline.learn.allreduce_session import AllReduceSession


PATIENCE = 1000  # batches that are repeated while nobody steps


class AllReduceLoader:
    """Batches of one data set; iterate once per epoch."""

    def __init__(
        self,
        session: AllReduceSession,
        number: int,
        data: Dataset[Any],
        *,
        batches: Sequence[int],
        policy: str,
        collate: Callable[[list[Any]], Any] | None,
        ahead: int,
        kept: LoaderState | None = None,
    ) -> None:
        self.number, self.batch_size = number, batches[session.rank]
        self.data, self.collate = data, collate  # kept: the session knows its loaders by their identity
        self.ahead = ahead  # in force from the next epoch on
        self.size = len(data)  # type: ignore[arg-type]
        self._session, self._batches, self.policy = session, tuple(batches), policy
        self.epoch = kept.standing.done if kept is not None else 0  # of the next iteration
        self._rounds = self._whole = self._rounds_of(None)
        self._left = self._left_of(kept)
        on_gpu = session.device.type == "cuda"
        self._copies = CopyStream(session.device) if on_gpu else None
        self._read = reader(data, collate, pinned=on_gpu)
        self._lies = data.tensors[0].device if isinstance(data, TensorDataset) else torch.device("cpu")
        self._iterating = False
        self._given = 0  # rounds of this epoch
        self._settled = 0  # of them, in gradients
        self._halted: Standing | None = None  # where it stood when the run was to end

    def _rounds_of(self, left: Spans | None) -> Rounds:
        return Rounds(
            size=self.size,
            batches=self._batches,
            rank=self._session.rank,
            partition=self.policy == "partition",
            left=left,
        )

    def _left_of(self, kept: LoaderState | None) -> Spans | None:
        """Of the epoch in which a run goes on."""
        if kept is None:
            return None
        return left_of(
            kept.standing,
            size=self.size,
            learners=len(self._batches),
            parts=kept.parts,
            partition=self.policy == "partition",
        )

    def __len__(self) -> int:
        """Batches of an epoch that this loop sees, those that it repeats without weight included."""
        return self._whole.count

    def __iter__(self) -> Iterator[Any]:
        if self._iterating:
            raise UsageError(f"loader {self.number} is being iterated already: one loop at a time")
        self._iterating = True
        self._session.epoch_begins(self.number, self.epoch)
        self._rounds = self._rounds_of(self._left) if self._left is not None else self._whole
        self._left, self._given, self._settled = None, 0, 0
        source = self._source()
        try:
            while self._session.goes_on() and self._given < self._rounds.count:
                share, batch = next(source)
                self._given += 1
                self._session.consume(self.number, share.weight, more=self._given < self._rounds.count)
                if self._given == self._rounds.count:
                    self._session.epoch_given(self.number, self.epoch)
                yield batch
        finally:
            source.close()  # type: ignore[attr-defined]
            self._leave()

    def _leave(self) -> None:
        if self._given < self._rounds.count:
            if self._session.ending:
                self._halted = self._halted or self.standing()
            else:
                self._session.epoch_given(self.number, self.epoch)  # the loop was left early
        self._session.epoch_left()
        self._iterating = False
        self.epoch += 1

    def settle(self) -> None:
        """A step was taken: what was handed out is in gradients."""
        self._settled = self._given

    def standing(self) -> Standing:
        """What a checkpoint says of it: all that is in gradients is done."""
        if self._halted is not None:
            return self._halted
        if self._iterating:
            return standing(self.epoch, self._rounds.after(self._settled))
        return standing(self.epoch, self._left) if self._left is not None else Standing.before(self.epoch)

    def _source(self) -> Iterator[tuple[Share, Any]]:
        order = epoch_order(
            self.size,
            seed=self._session.plan.seed,
            epoch=self.epoch,
            policy=self.policy,
            parts=len(self._batches),
        ).to(self._lies)
        shares = [self._rounds.share(number) for number in range(self._rounds.count)]
        if self.ahead and self._session.reader:
            return _read_ahead(shares, lambda share: self._batch(order, share), self.ahead, self._copies)
        return ((share, to_device(self._batch(order, share), self._session.device)) for share in shares)

    def _batch(self, order: Tensor, share: Share) -> Any:
        return self._read(order[share.start : share.stop])


def _read_ahead(
    shares: Sequence[Share], read: Callable[[Share], Any], ahead: int, copies: CopyStream | None
) -> Iterator[tuple[Share, Any]]:
    """A thread reads and collates, and copies to a GPU, while the loop computes."""
    done: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=ahead)
    ended = threading.Event()

    def put(item: tuple[Any, BaseException | None]) -> None:
        while not ended.is_set():
            try:
                done.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def reading() -> None:
        for share in shares:
            if ended.is_set():
                return
            try:
                put((read(share) if copies is None else copies.begin(read(share)), None))
            except BaseException as error:
                put((None, error))
                return

    thread = threading.Thread(target=reading, daemon=True)
    thread.start()
    try:
        for share in shares:
            batch, error = done.get()
            if error is not None:
                raise error
            yield share, batch if copies is None else copies.use(batch)
    finally:
        ended.set()
        thread.join()


class AllReduceSplitLoader:
    """An iterable data set, split by rank: every learner keeps its own share of the stream.

    Who comes to its end first repeats its last batch with weight zero until all have: only then the epoch ends. Where
    gradients are switched off nobody steps, and everybody comes to its own end.
    """

    def __init__(
        self,
        session: AllReduceSession,
        number: int,
        data: IterableDataset[Any],
        *,
        batch_size: int,
        collate: Callable[[list[Any]], Any] | None,
        policy: str,
        kept: LoaderState | None = None,
    ) -> None:
        self._session, self._data, self.number = session, data, number
        self.batch_size, self.policy, self.size = batch_size, policy, -1
        self.epoch = kept.standing.done if kept is not None else 0
        self._skip = (
            self._skip_of(kept) if kept is not None else 0
        )  # rounds that a run before has had of this epoch
        self._collate = collate or default_collate
        self._iterating = False
        self._given = 0  # rounds of this epoch
        self._settled = 0  # of them, in gradients
        self._halted: Standing | None = None  # where it stood when the run was to end

    def _skip_of(self, kept: LoaderState) -> int:
        spans = kept.standing.fresh.get(self.epoch, {})
        if spans and kept.parts != self._session.learners:
            raise UsageError(
                f"the stream of loader {self.number} was left in the middle of epoch {self.epoch} by {kept.parts} learners and "
                f"cannot go on with {self._session.learners}, who split it otherwise; resume with learners={kept.parts}"
            )
        return spans[0][0] if spans else 0

    def settle(self) -> None:
        """A step was taken: what was handed out is in gradients."""
        self._settled = self._given

    def standing(self) -> Standing:
        """What a checkpoint says of it: as one span, from the first round that is in no gradient."""
        if self._halted is not None:
            return self._halted
        rounds = self._settled if self._iterating else self._skip
        return standing(self.epoch, ((rounds, rounds + 1),)) if rounds else Standing.before(self.epoch)

    def __iter__(self) -> Iterator[Any]:
        self._iterating = True
        try:
            yield from self._epoch()
        finally:
            if self._iterating and self._session.ending:
                self._halted = self._halted or self.standing()
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
            held = following if following is not None else held
            following = next(batches, None) if following is not None else None
        self._given = self._settled = self._skip
        self._skip = 0
        return held, following

    def _epoch(self) -> Iterator[Any]:
        session = self._session
        more = True
        batches = self._batches()
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
            held = following if following is not None else held
            following = next(batches, None) if following is not None else None
            assert held is not None
            self._given += 1
            session.consume(self.number, 0 if repeated else len(held), more=following is not None)
            yield to_device(self._collate(list(held)), session.device)
            more = session.more_anywhere
        if session.ending and more:
            self._halted = self._halted or self.standing()
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

    def _batches(self) -> Iterator[list[Any]]:
        rank, learners = self._session.rank, self._session.learners
        held: list[Any] = []
        for index, item in enumerate(self._data):
            if index % learners == rank:
                held.append(item)
                if len(held) == self.batch_size:
                    yield held
                    held = []
        if held:
            yield held


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

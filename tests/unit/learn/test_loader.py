"""The feed of one learner: in which order, how far ahead, what a loop that is left or loses its servers gets."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from syncline.errors import UsageError
from syncline.learn.loader import POLICIES, ReadingAhead, Share, epoch_order, identity, read_ahead, reader
from syncline.messages import to_leader as say
from tests.unit.learn.servers_of_one import session_of_one

SIZE, BATCH = 10, 3


class Rows(Dataset[int]):
    """Read one by one, in the order that is noted."""

    def __init__(self, wrong: int = -1) -> None:
        self.read: list[int] = []
        self._wrong = wrong

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        if index == self._wrong:
            raise KeyError(index)
        return index


def order(epoch: int) -> list[list[int]]:
    return [part.tolist() for part in epoch_order(SIZE, seed=0, epoch=epoch).split(BATCH)]


# -- the published rule --------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 9), parts=st.integers(1, 5))
def test_an_epoch_has_every_example_once_but_a_sample(size: int, seed: int, epoch: int, parts: int) -> None:
    for policy in POLICIES:
        found = epoch_order(size, seed=seed, epoch=epoch, policy=policy, parts=parts)
        assert torch.equal(found, epoch_order(size, seed=seed, epoch=epoch, policy=policy, parts=parts))
        if policy == "sample":
            assert len(found) == size and found.min() >= 0 and found.max() < size
        else:
            assert sorted(found.tolist()) == list(range(size))


def test_parts_of_a_partition_keep_their_examples_and_change_their_order() -> None:
    epochs = [epoch_order(40, seed=3, epoch=epoch, policy="partition", parts=4).split(10) for epoch in (0, 1)]
    for one, other in zip(*epochs, strict=True):
        assert set(one.tolist()) == set(other.tolist()) and one.tolist() != other.tolist()


# -- reading -------------------------------------------------------------------------------------------------


def test_a_reader_collates_rows_and_takes_those_of_tensors_at_once() -> None:
    class Several(Rows):
        def __getitems__(self, indices: list[int]) -> list[int]:
            self.read.append(-1)
            return indices

    indices = torch.tensor([4, 0])
    assert reader(Rows(), None)(indices).tolist() == [4, 0] == reader(Rows(), list)(indices)
    several = Several()
    assert reader(several, tuple)(indices) == (4, 0) and several.read == [-1]
    pair = TensorDataset(torch.arange(6.0), torch.eye(6))
    first, second = reader(pair, None)(indices)
    assert first.tolist() == [4, 0] and torch.equal(second, torch.eye(6)[[4, 0]])
    assert reader(pair, len)(indices) == 2


@pytest.mark.parametrize(
    "data, ahead, found",
    [
        (Rows(), None, 2),
        (Rows(), 0, 0),
        (Rows(), 7, 7),
        (TensorDataset(torch.ones(2)), None, 0),
        (TensorDataset(torch.ones(2), torch.ones(2, device="meta")), None, 2),  # not all of it lies there
        (TensorDataset(torch.ones(2)), 1, 1),
    ],
)
def test_how_many_batches_are_read_ahead(data: Any, ahead: int | None, found: int) -> None:
    assert read_ahead(data, ahead) == found


@pytest.mark.parametrize("ahead", [-1, True, 1.0, "2"])
def test_what_is_no_number_of_batches_is_refused(ahead: Any) -> None:
    with pytest.raises(UsageError, match="ahead must be a whole number of at least 0"):
        read_ahead(Rows(), ahead)


@pytest.mark.parametrize("threaded", [False, True])
def test_batches_come_in_the_order_in_which_they_were_wanted(threaded: bool) -> None:
    reading = ReadingAhead(lambda portion: 6 // portion, None, threaded=threaded)
    for portion in (3, 0, 1):
        reading.want(portion)
    assert reading.get() == (3, 2, None)
    portion, batch, error = reading.get()
    assert (portion, batch) == (0, None) and isinstance(error, ZeroDivisionError)
    assert reading.get() == (1, 6, None)
    reading.close()


def lambdas(captured: Any) -> Iterator[Callable[[Any], Any]]:
    while True:
        yield lambda items: (captured, items)


def test_functions_of_one_piece_of_code_are_the_same_if_they_captured_the_same() -> None:
    data, other = [1], [1]
    again, different = lambdas(data), lambdas(other)
    first = next(again)
    assert identity(first) == identity(next(again)) != identity(next(different))
    assert identity(partial(first, data)) == identity(partial(first, data)) != identity(partial(first, other))
    assert identity(partial(max, key=data)) != identity(partial(max, key=other))
    rows, others = Rows(), Rows()
    assert identity(rows.__len__) == identity(rows.__len__) != identity(others.__len__)


# -- loops over a loader -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_each_loop_is_an_epoch_in_its_order(ahead: int) -> None:
    session, _ = session_of_one()
    loader = session.loader(Rows(), batch_size=BATCH, ahead=ahead)
    for epoch in range(3):
        assert loader.epoch == epoch and len(loader) == 4
        assert [batch.tolist() for batch in loader] == order(epoch)
        assert session.examples == SIZE * (epoch + 1)
        _, number, used = session.take_usage()
        session.examples = SIZE * (epoch + 1)
        assert (number, used) == (0, 5 * epoch + 4), "portions, with the ends of the epochs before"


@pytest.mark.parametrize("ahead, asked", [(0, 2), (1, 4), (2, 6), (3, 7)])
def test_portions_are_asked_for_beyond_those_that_are_read_ahead(ahead: int, asked: int) -> None:
    session, servers = session_of_one()
    loop = iter(session.loader(Rows(), batch_size=1, ahead=ahead))
    next(loop)  # of 1 + ahead that were handed out
    assert len(servers.of(say.AskBatch)) == asked
    loop.close()


def test_a_loop_that_is_left_says_so_and_the_next_is_another_epoch() -> None:
    session, servers = session_of_one()
    loader = session.loader(Rows(), batch_size=BATCH)
    for batch in loader:
        assert batch.tolist() == order(0)[0]
        break
    assert servers.of(say.CloseLoader) == [say.CloseLoader(0, 1)] and loader.epoch == 1
    assert [batch.tolist() for batch in loader] == order(1)


def test_an_error_of_the_data_set_comes_when_its_batch_is_due() -> None:
    data = Rows(wrong=order(0)[1][0])
    loader = session_of_one()[0].loader(data, batch_size=BATCH, ahead=2)
    seen = []
    with pytest.raises(KeyError):
        seen.extend(batch.tolist() for batch in loader)
    assert seen == order(0)[:1]


@pytest.mark.parametrize("ahead", [0, 2])
def test_new_servers_give_the_epoch_again(ahead: int) -> None:
    session, servers = session_of_one()
    loader = session.loader(Rows(), batch_size=BATCH, ahead=ahead)
    seen = []
    for batch in loader:
        servers.renewed = not seen
        seen.append(batch.tolist())
    assert seen == order(0)[:1] + order(0) and loader.epoch == 1


def test_a_run_that_ends_ends_the_loop() -> None:
    session, servers = session_of_one()
    batches = iter(session.loader(Rows(), batch_size=BATCH, ahead=0))
    next(batches)
    servers.stops = True
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert session.examples == BATCH and not servers.of(say.CloseLoader)


def test_one_loop_at_a_time() -> None:
    loader = session_of_one()[0].loader(Rows(), batch_size=BATCH)
    loop = iter(loader)
    next(loop)
    with pytest.raises(UsageError, match="loader 0 is being iterated already"):
        next(iter(loader))
    loop.close()
    assert next(iter(loader)).tolist() == order(1)[0]


# -- streams -------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    def __init__(self, items: list[float], wrong: bool = False) -> None:
        self._items, self._wrong = items, wrong

    def __iter__(self) -> Iterator[Tensor]:
        yield from map(torch.tensor, self._items)
        if self._wrong:
            raise KeyError("the file ends early")


@pytest.mark.parametrize("count, told", [(12, 2), (11, 2), (9, 2), (1, 1), (2, 1)])
def test_a_learner_reads_its_share_and_ends_with_the_last_gradient(count: int, told: int) -> None:
    session, servers = session_of_one(learners=2)
    loader = session.loader(Stream([float(each) for each in range(count)]), batch_size=BATCH)
    for epoch in range(2):
        seen = []
        for batch in loader:
            assert len(servers.of(say.StreamEnded)) == epoch
            seen += batch.tolist()
            session.take_usage()
        assert seen == list(range(0, count, 2)) and loader.epoch == epoch + 1
        assert servers.of(say.StreamEnded)[-1] == say.StreamEnded(0, told * (epoch + 1))


def test_what_fails_in_a_stream_fails_when_it_is_due() -> None:
    session, _ = session_of_one()
    loop = iter(session.loader(Stream([0.0, 1.0], wrong=True), batch_size=1))
    for number in range(2):
        assert next(loop).tolist() == [number]
        session.take_usage()  # it looks for a further one
    with pytest.raises(KeyError):
        next(loop)


def test_an_empty_stream_is_refused_and_has_no_length() -> None:
    loader = session_of_one()[0].loader(Stream([]), batch_size=1)
    with pytest.raises(UsageError, match="gave no example: its __iter__ must begin anew"):
        list(islice(loader, 1))
    with pytest.raises(TypeError, match="nobody knows how many"):
        len(loader)


def test_what_a_stream_has_open_is_closed_when_its_share_is_let_go_of() -> None:
    closed = []

    def lines() -> Iterator[int]:
        try:
            yield from range(5)
        finally:
            closed.append(True)

    gc.collect()
    gc.disable()
    try:
        share = Share(lines(), 1, 2)
        assert next(share) == 1 and not closed
        del share
        assert closed
    finally:
        gc.enable()

"""The feed of learners among equals: who computes what, how a loop is left and gone on with, and which gradients are zeros."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from syncline.errors import UsageError
from syncline.learn.allreduce_loader import PATIENCE, AllReduceLoader, AllReduceSplitLoader, ZeroGradients
from syncline.protocols.epoch_positions import Standing
from syncline.roles.checkpoint_manifest import LoaderState


class Listener:
    """A session that notes what its loader says; `left` more batches until the run is to end."""

    device, reader, ending, more_anywhere = torch.device("cpu"), False, False, True

    def __init__(self, rank: int = 0, learners: int = 1, left: int | None = None) -> None:
        self.rank, self.learners, self.left = rank, learners, left
        self.plan = type("Plan", (), {"seed": 7})
        self.iterations = 0
        self.weights: list[int] = []
        self.more: list[bool] = []
        self.said: list[Any] = []

    def goes_on(self) -> bool:
        self.ending = self.left is not None and len(self.weights) >= self.left
        return not self.ending

    def consume(self, loader: int, count: int, *, more: bool) -> None:
        self.weights.append(count)
        self.more.append(more)

    def epoch_begins(self, loader: int, epoch: int) -> None:
        self.said.append(("begins", epoch))

    def epoch_given(self, loader: int, epoch: int) -> None:
        self.said.append(("given", epoch))

    def epoch_left(self) -> None:
        self.said.append("left")


def loader(session: Listener, data: Any, batches: Iterable[int], **options: Any) -> AllReduceLoader:
    kind = AllReduceSplitLoader if isinstance(data, IterableDataset) else AllReduceLoader
    given = {"policy": "ledger", "collate": None, "ahead": 0, "kept": None, **options}
    return kind(session, 0, data, batches=tuple(batches), **given)  # type: ignore[arg-type]


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def crowd(size: int, batches: list[int], **options: Any) -> list[tuple[Listener, AllReduceLoader]]:
    sessions = [Listener(rank, len(batches)) for rank in range(len(batches))]
    return [(session, loader(session, numbers(size), batches, **options)) for session in sessions]


def counted(session: Listener, batches: Iterable[Any]) -> list[int]:
    """Examples that have weight, as they were handed out."""
    return [int(x) for (batch,) in batches for x in batch[: session.weights[-1]]]


# -- data sets with a length ---------------------------------------------------------------------------------

batches_of = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(batches=batches_of, size=st.integers(4, 40), partition=st.booleans(), ahead=st.sampled_from([0, 1, 3]))
def test_all_learners_take_as_many_batches_and_every_example_counts_once(
    batches: list[int], size: int, partition: bool, ahead: int
) -> None:
    policy = "partition" if partition else "ledger"
    found, steps = [], set()
    for session, own in crowd(size, batches, policy=policy, ahead=ahead):
        session.reader = ahead > 0
        for epoch in range(2):
            before = len(session.weights)
            found.append((epoch, counted(session, own)))
            steps.add(len(session.weights) - before)
            assert session.more[before:] == [True] * (len(own) - 1) + [False]
        steps.add(len(own))
        each = [[("begins", epoch), ("given", epoch), "left"] for epoch in range(2)]
        assert session.said == each[0] + each[1]
    assert len(steps) == 1
    for epoch in range(2):
        assert sorted(x for e, each in found if e == epoch for x in each) == list(range(size))


@settings(max_examples=40)
@given(batches=batches_of, size=st.integers(8, 40), after=st.integers(0, 3), partition=st.booleans())
def test_a_run_goes_on_with_the_examples_that_were_in_no_gradient(
    batches: list[int], size: int, after: int, partition: bool
) -> None:
    options = {"policy": "partition" if partition else "ledger"}
    done, following, standings = [], [], []
    for session, own in crowd(size, batches, **options):
        session.left = min(after, len(own) - 1)  # the last that was handed out is in a gradient, too
        for (batch,) in own:
            done += [int(x) for x in batch[: session.weights[-1]]]
            own.settle()
        standings.append(own.standing())
    assert all(standing == standings[0] for standing in standings)
    kept = LoaderState(size=size, policy=options["policy"], parts=len(batches), standing=standings[0])
    for session, own in crowd(size, batches, kept=kept, **options):
        assert own.epoch == 0
        done += counted(session, own)
        assert own.epoch == 1
        following += counted(session, own)
    assert sorted(done) == sorted(following) == list(range(size)), "and then a whole epoch"


def test_what_was_handed_out_without_a_step_is_handed_out_again() -> None:
    session = Listener(left=3)
    own = loader(session, numbers(10), [2])
    for number, _ in enumerate(own):
        if number == 0:
            own.settle()
    kept = LoaderState(size=10, policy="ledger", parts=1, standing=own.standing())
    again = Listener()
    assert len(counted(again, loader(again, numbers(10), [2], kept=kept))) == 8


def test_a_loop_that_is_left_early_has_given_its_epoch_and_the_next_begins() -> None:
    session = Listener()
    own = loader(session, numbers(6), [2])
    for _ in own:
        break
    assert session.said == [("begins", 0), ("given", 0), "left"] and own.epoch == 1
    assert own.standing() == Standing.before(1)
    assert sorted(counted(session, own)) == list(range(6))


def test_one_loop_at_a_time() -> None:
    own = loader(Listener(), numbers(6), [2])
    for _ in own:
        with pytest.raises(UsageError, match="is being iterated already"):
            next(iter(own))


class Torn(Dataset[int]):
    bad = -1

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if self.bad == index:
            raise OSError("unreadable")
        return index


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_example_that_cannot_be_read_raises_where_its_batch_is_due(ahead: int) -> None:
    session, data = Listener(), Torn()
    session.reader = True
    order = [int(x) for batch in loader(Listener(), data, [2]) for x in batch]
    data.bad = order[3]
    found: list[int] = []
    with pytest.raises(OSError, match="unreadable"):
        found.extend(int(x) for batch in loader(session, data, [2], ahead=ahead) for x in batch)
    assert found == order[:2] and session.weights == [2]


# -- streams -------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._size))


def split(size: int, batch: int, learners: int, **options: Any) -> list[tuple[Listener, AllReduceLoader]]:
    sessions = [Listener(rank, learners) for rank in range(learners)]
    return [(each, loader(each, Stream(size), [batch] * learners, **options)) for each in sessions]


def in_step(learners: list[tuple[Listener, AllReduceLoader]]) -> list[list[list[int]]]:
    """One epoch, a step after each batch: rank -> its batches that count."""
    found: list[list[list[int]]] = [[] for _ in learners]
    for batches in zip_longest(*(own for _, own in learners)):
        assert None not in batches, "some step oftener than others"
        assert learners[0][0].iterations < 200, "it never ends"
        for (session, own), mine, batch in zip(learners, found, batches, strict=True):
            if session.weights[-1]:
                mine.append(batch.tolist())
            session.iterations += 1
            own.settle()
        more = any(session.more[-1] for session, _ in learners)
        for session, _ in learners:
            session.more_anywhere = more
    return found


@settings(max_examples=40)
@given(size=st.integers(4, 30), batch=st.integers(1, 4), learners=st.integers(1, 4))
def test_a_stream_is_split_and_all_step_until_the_longest_share_is_over(
    size: int, batch: int, learners: int
) -> None:
    crowd_ = split(size, batch, learners)
    for epoch in range(2):
        for rank, mine in enumerate(in_step(crowd_)):
            assert [x for each in mine for x in each] == list(range(rank, size, learners))
            assert all(len(each) == batch for each in mine[:-1])
        assert all(own.epoch == epoch + 1 for _, own in crowd_)
        for session, _ in crowd_:
            session.more_anywhere = True


def test_a_stream_goes_on_behind_the_batches_that_are_in_gradients() -> None:
    session = Listener(left=2)
    own = loader(session, Stream(10), [2])
    for _ in own:
        own.settle()
    kept = LoaderState(size=-1, policy="ledger", parts=1, standing=own.standing())
    ((again, other),) = split(10, 2, 1, kept=kept)
    assert other.standing() == kept.standing
    assert in_step([(again, other)]) == [[[4, 5], [6, 7], [8, 9]]]
    with pytest.raises(UsageError, match=r"in the middle of epoch 1 by 1 learners and cannot go on with 2"):
        split(10, 2, 2, kept=kept)


def test_a_loop_over_a_stream_that_is_left_as_the_run_ends_says_where_it_was() -> None:
    ((session, own),) = split(10, 2, 1)
    for _ in own:
        own.settle()
        session.ending = True  # a step that does not return
        break
    assert own.standing().fresh == {0: {0: (1, 2)}}


def test_a_share_without_an_example_is_refused() -> None:
    (_, own), (_, empty) = split(1, 1, 2)
    assert next(iter(own)).tolist() == [0]
    with pytest.raises(UsageError, match="learner 1 of 2 has no example of this iterable data set"):
        next(iter(empty))


def test_who_waits_for_others_without_a_step_is_told_so() -> None:
    session = Listener(0, 2)
    own = loader(session, Stream(2), [1, 1])
    with pytest.raises(UsageError, match=f"repeated its last batch {PATIENCE} times without a step"):
        for _ in own:
            pass
    assert session.weights == [1] + [0] * PATIENCE


def test_under_no_grad_everybody_comes_to_its_own_end() -> None:
    session = Listener(0, 2)
    with torch.no_grad():
        assert [batch.tolist() for batch in loader(session, Stream(5), [2, 2])] == [[0, 2], [4]]
    assert session.said == [("begins", 0), ("given", 0), "left"]


# -- zeros ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "handed_out, silent",
    [
        ([(0, False)], False),
        ([(0, False), (0, True)], True),
        ([(0, True)], True),
        ([(0, False), (0, True), (0, False)], False),
        ([(1, False), (0, True)], False),  # zipped: beside a new one of another loader
        ([(0, True), (1, False)], False),
        ([(0, False), (1, False), (0, True)], False),
        ([(0, False), (1, False), (0, True), (1, True)], True),  # both are repeated
        ([(0, False), (1, False), (0, True), (1, True), (0, True), (1, True)], True),
    ],
)
def test_repeated_batches_are_silent(handed_out: list[tuple[int, bool]], silent: bool) -> None:
    layer, frozen = nn.Linear(3, 1), nn.Parameter(torch.zeros(2), requires_grad=False)
    silence = ZeroGradients()
    silence.add([*layer.parameters(), frozen])
    for loader, repeated in handed_out:
        silence.handed_out(loader, repeated=repeated)
    for wanted in (silent, False):
        layer.zero_grad()
        layer(torch.ones(1, 3)).sum().backward()
        assert all((value.grad == 0).all() == wanted for value in layer.parameters())
        silence.end()


def test_parameters_that_are_unfrozen_between_two_repeated_batches() -> None:
    layer, silence = nn.Linear(3, 1), ZeroGradients()
    layer.bias.requires_grad_(False)
    silence.add(layer.parameters())
    silence.handed_out(0, repeated=True)
    layer.bias.requires_grad_(True)
    silence.handed_out(0, repeated=True)
    layer(torch.ones(1, 3)).sum().backward()
    assert all((value.grad == 0).all() for value in layer.parameters())

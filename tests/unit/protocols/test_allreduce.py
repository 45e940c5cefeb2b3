"""The decisions of all-reduce: buckets, the delayed pipeline, its vote, and the rounds of the feed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.protocols.allreduce import (
    Filling,
    Pipeline,
    Rounds,
    Spans,
    Vote,
    ahead,
    behind,
    equal_shares,
    left_of,
    plan_buckets,
    standing,
    turn,
    whole,
)
from syncline.protocols.epoch_positions import Grant, Standing
from syncline.protocols.ledger import Ledger

PARAMETERS = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from(["f32", "bf16"])), min_size=1, max_size=20
)


@given(PARAMETERS, st.none() | st.integers(1, 80))
def test_every_parameter_is_in_one_bucket_of_its_kind(
    parameters: list[tuple[int, str]], limit: int | None
) -> None:
    sizes, kinds = zip(*parameters, strict=True)
    plan = plan_buckets(sizes, kinds, limit)
    assert sorted(index for bucket in plan for index in bucket) == list(range(len(sizes)))
    for bucket in plan:
        assert len({kinds[index] for index in bucket}) == 1
        assert all(a > b for a, b in pairwise(bucket)), "in the order in which backward makes gradients"
        if limit is not None:
            assert sum(sizes[index] for index in bucket[:-1]) < limit, "full only with its last"
    assert all(a[-1] > b[-1] for a, b in pairwise(plan)), "whose last gradient comes first is reduced first"
    if limit is None:
        assert len(plan) == len(set(kinds))


@given(PARAMETERS, st.data())
def test_buckets_start_in_order_whatever_order_gradients_come_in(
    parameters: list[tuple[int, str]], data: st.DataObject
) -> None:
    sizes, kinds = zip(*parameters, strict=True)
    plan = plan_buckets(sizes, kinds, 40)
    filling = Filling(plan)
    coming = data.draw(st.permutations(range(len(sizes))))
    coming = coming[: data.draw(st.integers(0, len(coming)))]
    started: list[int] = []
    for place, index in enumerate(coming):
        started += filling.come(index)
        assert not list(filling.come(index)), "a second time changes nothing"
        here = set(coming[: place + 1])
        assert all(here.issuperset(plan[number]) for number in started)
        ready = next((n for n, bucket in enumerate(plan) if not here.issuperset(bucket)), len(plan))
        assert len(started) == ready
    started += filling.rest()
    assert started == list(range(len(plan))) and filling.complete
    filling.begin()
    assert filling.started == 0 and not any(filling.has(index) for index in range(len(sizes)))


@given(st.integers(0, 5), st.integers(0, 30))
def test_a_delay_of_k_applies_exactly_k_steps_later(delay: int, steps: int) -> None:
    pipeline, applied, version = Pipeline(delay), [], 0
    sigmas = []
    for step in range(steps):
        stamp = version
        assert pipeline.start() == step
        while (due := pipeline.due()) is not None:
            applied.append(due)
            assert due == step - delay
            version += 1
        sigmas.append((step, stamp))
    while (due := pipeline.flush()) is not None:
        applied.append(due)
    assert applied == list(range(steps)), "each once, in order, the last ones at the end"
    assert [step - stamp for step, stamp in sigmas] == [min(step, delay) for step in range(steps)]
    assert pipeline.oldest() is None


@given(st.lists(st.integers(0, 4), max_size=40))
def test_a_depth_that_changes_loses_nothing(depths: list[int]) -> None:
    pipeline, applied = Pipeline(0), []
    for depth in depths:
        pipeline.depth = depth
        pipeline.start()
        while (due := pipeline.due()) is not None:
            applied.append(due)
        assert pipeline.started - len(applied) <= depth
    while (due := pipeline.flush()) is not None:
        applied.append(due)
    assert applied == list(range(len(depths)))


@given(st.integers(1, 10**6), st.lists(st.booleans(), min_size=1, max_size=50))
def test_a_step_that_some_have_left_out_is_seen_by_all(steps: int, left_out: list[bool]) -> None:
    taken = [steps - missing for missing in left_out]
    counts = [sum(column) for column in zip(*map(turn, taken), strict=True)]
    for each in taken:
        assert ahead(counts, each) == sum(other > each for other in taken)
        assert behind(counts, each) == sum(other < each for other in taken)


SUMS = st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.integers(0, 3)), max_size=300)


@given(st.integers(1, 5), SUMS)
def test_the_vote_stays_within_its_limit_and_moves_one_by_one(
    limit: int, sums: list[tuple[float, float, int]]
) -> None:
    votes = [Vote(limit=limit, learners=3), Vote(limit=limit, learners=3)]
    for each in sums:
        before = votes[0].depth
        changes = {vote.add(*each) for vote in votes}
        assert len(changes) == 1, "the same sums give the same depth everywhere"
        assert 1 <= votes[0].depth <= limit and abs(votes[0].depth - before) <= 1
        assert changes == {votes[0].depth if votes[0].depth != before else None}


def test_waiting_makes_it_deeper_and_idle_links_less_deep() -> None:
    vote = Vote(limit=3, learners=2, window=4)
    depths = [vote.add(0.5, 1.0, 0) for _ in range(12)]
    assert [depth for depth in depths if depth] == [2, 3] and vote.depth == 3
    for _ in range(40):
        vote.add(0.0, 1.0, 2)
    assert vote.depth == 1
    for _ in range(4):
        vote.add(0.5, 1.0, 0)
    assert vote.depth == 2
    before = sum(vote.add(0.0, 1.0, 2) is None for _ in range(100))
    assert before < 100 and vote.depth == 1, "it comes back, later than the first time"


def test_who_needs_the_depth_keeps_it() -> None:
    vote = Vote(limit=3, learners=2, window=4)
    for _ in range(4):
        vote.add(0.5, 1.0, 0)
    for _ in range(100):
        assert vote.add(0.01, 1.0, 1) is None, "the next is not complete at all learners"


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_rounds_are_those_of_the_ledger_in_lockstep(size: int, learners: int, batch: int) -> None:
    """One epoch through the ledger, all learners asking in turn, against what each computes by itself."""
    ledger = Ledger(size=size, batch_size=batch, learners=learners, lockstep=True)
    decisions = [each for rank in range(learners) for each in ledger.join(rank + 1, rank)]
    for _ in range(-(-size // batch) + 1):
        for learner in range(1, learners + 1):
            decisions += ledger.ask(learner, 0)
    got: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(learners)}
    for each in decisions:
        if isinstance(each, Grant) and each.epoch == 0:
            got[each.learner - 1].append((each.start, each.stop))
    for rank in range(learners):
        rounds = Rounds(size=size, batches=(batch,) * learners, rank=rank, partition=False)
        shares = [rounds.share(number) for number in range(rounds.count)]
        assert [(share.start, share.stop) for share in shares if share.weight] == got[rank]


@given(st.integers(1, 60), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_rounds_give_every_example_once_and_everybody_a_batch(
    size: int, batches: list[int], partition: bool
) -> None:
    found: list[int] = []
    counts = set()
    for rank in range(len(batches)):
        rounds = Rounds(size=size, batches=batches, rank=rank, partition=partition)
        counts.add(rounds.count)
        for number in range(rounds.count):
            share = rounds.share(number)
            assert 0 <= share.start < share.stop <= size and share.stop - share.start <= batches[rank]
            assert share.weight in (0, share.stop - share.start)
            found += range(share.start, share.stop) if share.weight else []
    assert sorted(found) == list(range(size)) and len(counts) == 1


@pytest.mark.parametrize(
    "joint, learners, shares", [(10, 3, (4, 3, 3)), (8, 4, (2, 2, 2, 2)), (3, 3, (1, 1, 1))]
)
def test_shares_of_a_joint_batch(joint: int, learners: int, shares: tuple[int, ...]) -> None:
    assert equal_shares(joint, learners) == shares


# -- feeds that go on --------------------------------------------------------------------------------------------


def positions(size: int, batches: tuple[int, ...], partition: bool, left: Spans | None) -> list[list[int]]:
    """What counts in each round, over all learners."""
    feeds = [
        Rounds(size=size, batches=batches, rank=rank, partition=partition, left=left)
        for rank in range(len(batches))
    ]
    assert len({feed.count for feed in feeds}) == 1
    shares = [[feed.share(number) for feed in feeds] for number in range(feeds[0].count)]
    return [[p for s in each if s.weight for p in range(s.start, s.stop)] for each in shares]


@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_a_feed_that_goes_on_has_the_rounds_that_were_left(
    size: int, sizes: list[int], partition: bool, data: st.DataObject
) -> None:
    batches = tuple(sizes)
    all_rounds = positions(size, batches, partition, None)
    done = data.draw(st.integers(0, len(all_rounds)))
    feed = Rounds(size=size, batches=batches, rank=0, partition=partition)
    found = standing(4, feed.after(done))
    left = left_of(found, size=size, learners=len(batches), parts=len(batches), partition=partition)
    if done == len(all_rounds):
        assert found.done == 5 and left is None
    else:
        assert found.done == 4
        assert positions(size, batches, partition, left) == all_rounds[done:]


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.data())
def test_any_number_of_learners_goes_on_with_what_is_left(
    size: int, before: int, after: int, batch: int, data: st.DataObject
) -> None:
    feed = Rounds(size=size, batches=(batch,) * before, rank=0, partition=False)
    done = data.draw(st.integers(0, feed.count - 1))
    left = left_of(standing(0, feed.after(done)), size=size, learners=after, parts=before, partition=False)
    rest = [p for each in positions(size, (batch,) * after, False, left) for p in each]
    assert rest == list(range(done * batch * before, size))


def at(fresh: dict[int, dict[int, tuple[int, int]]], returned: list[tuple[int, int, int]]) -> Standing:
    return Standing(
        done=2, newest=max(fresh, default=2), fresh=fresh, returned=returned, skipped={}, broken=[]
    )


def test_what_servers_have_handed_out_and_not_folded_is_left_too() -> None:
    found = at({2: {0: (30, 50)}}, [(2, 20, 25), (2, 25, 30)])
    assert left_of(found, size=50, learners=3, parts=3, partition=False) == ((20, 50),)
    assert left_of(Standing.before(3), size=50, learners=3, parts=2, partition=False) is None
    assert whole(50, 3, partition=True) == ((0, 16), (16, 33), (33, 50))


@pytest.mark.parametrize(
    "found, words",
    [
        (at({2: {0: (30, 50)}, 3: {0: (0, 50)}}, []), "epochs 3, 4 are not folded yet"),
        (at({2: {0: (30, 50)}}, [(2, 10, 15)]), r"is not the end of \(0, 50\)"),
        (at({2: {0: (30, 40)}}, []), r"is not the end of \(0, 50\)"),
    ],
)
def test_a_feed_that_is_no_rest_of_one_epoch_is_refused(found: Standing, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        left_of(found, size=50, learners=2, parts=2, partition=False)

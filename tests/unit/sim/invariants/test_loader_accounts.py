"""The account of a loader: a run that keeps the rules passes, whatever happens in it, and every breach is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.protocols.epoch_positions import Standing
from syncline.sim.invariants.loader_accounts import Broken, FeedAccount, StreamAccount

SIZE, BATCH = 8, 2

turns = st.lists(
    st.tuples(st.sampled_from(["grant", "publish", "settle", "lose", "die"]), st.integers(0, 2)), max_size=60
)


@given(turns)
@settings(max_examples=50)
def test_a_run_that_hands_every_position_out_once_is_never_broken(turns: list[tuple[str, int]]) -> None:
    """Positions that come back are handed out again; an epoch is done when all of it is settled."""
    feed = FeedAccount(SIZE, None, None)
    epoch, settled = 0, 0
    free = [(start, start + BATCH) for start in range(0, SIZE, BATCH)]
    has: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    given_, published = dict.fromkeys(has, 0), list[Any]()
    for what, learner in turns:
        if what == "grant" and free:
            span = free.pop(0)
            feed.granted(learner, given_[learner], (epoch, *span))
            given_[learner] += 1
            has[learner].append(span)
        elif what == "publish" and has[learner]:
            spans = feed.used(learner, given_[learner])
            assert [(start, stop) for _, start, stop in spans] == has[learner]
            published.append(spans)
            has[learner] = []
        elif what in ("settle", "lose") and published:
            spans = published.pop(0)
            (feed.settled if what == "settle" else feed.back)(spans, what)
            free += [(start, stop) for _, start, stop in spans] if what == "lose" else []
            settled += sum(stop - start for _, start, stop in spans) if what == "settle" else 0
        elif what == "die":
            feed.left(learner)
            free += has[learner]
            has[learner], given_[learner] = [], 0
        if settled == SIZE:
            with pytest.raises(Broken, match=f"all of epoch {epoch} is settled"):
                feed.due()
            feed.epoch_done(epoch, 0)
            epoch, settled, free = epoch + 1, 0, [(start, start + BATCH) for start in range(0, SIZE, BATCH)]
        feed.due()
        left = {0: (0, SIZE - settled)}  # however the ledger cuts it
        known = {"done": epoch, "newest": epoch, "returned": [], "skipped": {epoch: 0}, "broken": []}
        feed.compare(Standing(**known, fresh={epoch: left}))  # type: ignore[arg-type]
        with pytest.raises(Broken, match="are not settled, the ledger knows of"):
            feed.compare(Standing(**known, fresh={epoch: {0: (0, SIZE - settled + 1)}}))  # type: ignore[arg-type]


def account(epochs: int | None = 2) -> FeedAccount:
    """Learner 0 has two batches, one of them in a gradient; learner 1 has one."""
    feed = FeedAccount(SIZE, epochs, None)
    feed.granted(0, 0, (0, 0, 2)), feed.granted(0, 1, (0, 2, 4)), feed.granted(1, 0, (0, 4, 6))
    assert feed.used(0, 1) == [(0, 0, 2)]
    return feed


def settled(feed: FeedAccount) -> FeedAccount:
    feed.settled([(0, 0, 2)], "folded")
    return feed


@pytest.mark.parametrize(("does", "words"), [
    (lambda feed: feed.granted(1, 1, (0, 1, 3)), "position 1 of epoch 0 is out, not free"),
    (lambda feed: feed.granted(1, 3, (0, 6, 8)), "gets answer 3, after 1 of them"),
    (lambda feed: feed.granted(1, 1, (0, 7, 9)), "positions 7…8 of 8"),
    (lambda feed: settled(feed).granted(1, 1, (0, 0, 2)), "is settled, not free"),
    (lambda feed: settled(feed).settled([(0, 0, 2)], "folded"), "folded: position 0 of epoch 0 is settled, not out"),
    (lambda feed: feed.settled([(0, 6, 8)], "folded"), "is free, not out"),
    (lambda feed: feed.epoch_done(0, 0), "2 were never in an update, 6 are in gradients"),
    (lambda feed: feed.complete(), "only 0 of 2 epochs are done; of epoch 0 2 examples were never in an update, 6 are out"),
])  # fmt: skip
def test_what_cannot_be_is_said(does: Callable[[FeedAccount], None], words: str) -> None:
    with pytest.raises(Broken, match=words):
        does(account())


def test_leftovers_are_skipped_only_where_a_loop_was_left() -> None:
    feed = account()
    settled(feed)
    feed.left(1)
    with pytest.raises(Broken, match="nobody left its loop"):
        settled(account_without_others()).epoch_done(0, 6)
    feed.closed(0, 1)  # having used one
    feed.epoch_done(0, 6)
    with pytest.raises(Broken, match="was done before"):
        feed.epoch_done(0, 0)
    with pytest.raises(Broken, match="of epoch 0, which is done"):
        feed.granted(2, 0, (0, 0, 2))


def account_without_others() -> FeedAccount:
    feed = FeedAccount(SIZE, None, None)
    feed.granted(0, 0, (0, 0, 2)), feed.used(0, 1)
    return feed


def test_epochs_that_are_done_early_count_when_those_before_are() -> None:
    feed = FeedAccount(2, 2, None)
    for epoch in (0, 1):
        feed.granted(0, epoch, (epoch, 0, 2))
    spans = feed.used(0, 2)
    feed.settled(spans[1:], "folded"), feed.epoch_done(1, 0)
    assert feed.done == 0
    feed.settled(spans[:1], "folded"), feed.epoch_done(0, 0)
    assert feed.done == 2
    feed.complete()


def test_a_run_that_goes_on_has_settled_what_its_checkpoint_says() -> None:
    standing = Standing(
        done=1,
        newest=3,
        fresh={1: {0: (4, 8)}, 3: {0: (0, 8)}},
        returned=[(1, 0, 2)],
        skipped={1: 0, 3: 0},
        broken=[],
    )
    feed = FeedAccount(SIZE, None, standing)
    feed.compare(standing)
    for index, span in enumerate([(1, 0, 2), (1, 4, 8)]):
        feed.granted(0, index, span)
    with pytest.raises(Broken, match="is settled, not free"):
        feed.granted(0, 2, (1, 2, 4))
    with pytest.raises(Broken, match="epoch 2, which is done"):
        feed.granted(1, 0, (2, 0, 2))
    feed.settled(feed.used(0, 2), "folded")
    feed.epoch_done(1, 0)
    assert feed.done == 3


# -- streams -------------------------------------------------------------------------------------------------


def stream() -> StreamAccount:
    """Learner 0 has read three batches of its first epoch, two of them in a gradient."""
    account = StreamAccount(2, None)
    account.granted(0, 0, (0, 0, 0))
    assert account.used(0, 2) == [(0, 0, 2)]
    return account


@pytest.mark.parametrize(("does", "words"), [
    (lambda feed: feed.epoch_done(0, 0), r"\[0\] read it"),
    (lambda feed: feed.epoch_done(1, 0), "the next to be done is 0"),
    (lambda feed: (feed.closed(0, 3), feed.epoch_done(0, 0)), r"\[\(0, 0, 2\)\] are in no update"),
    (lambda feed: (feed.settled([(0, 0, 2)], "folded"), feed.back([(0, 0, 2)], "lost")), "0…1 of epoch 0 are settled twice"),
    (lambda feed: feed.granted(0, 0, (0, 0, 0)), "gets answer 0, after 1"),
    (lambda feed: feed.compare(Standing.before(1)), "1 epochs are said to be done, 0 are"),
    (lambda feed: feed.complete(), "only 0 of 2 epochs are done"),
])  # fmt: skip
def test_what_cannot_be_of_a_stream_is_said(does: Callable[[StreamAccount], Any], words: str) -> None:
    with pytest.raises(Broken, match=words):
        does(stream())


def test_a_gradient_over_the_end_of_an_epoch_belongs_to_both() -> None:
    account = stream()
    account.closed(0, 3)
    account.granted(0, 1, (1, 0, 0))
    assert account.used(0, 5) == [(0, 2, 5)]
    account.settled([(0, 0, 2)], "folded")
    with pytest.raises(Broken, match=r"\[\(0, 2, 5\)\] are in no update"):
        account.epoch_done(0, 0)
    account.settled([(0, 2, 5)], "folded")
    account.epoch_done(0, 0)
    with pytest.raises(Broken, match="begins epoch 0, which is done"):
        account.granted(1, 0, (0, 0, 0))
    account.left(0)
    account.epoch_done(1, 0)
    account.complete()

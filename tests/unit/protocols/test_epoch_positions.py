"""The stock of positions (M7): each is in one place, also after it was put down and taken up again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.protocols.epoch_positions import EpochDone, EpochPositions, Span

moves = st.lists(st.tuples(st.sampled_from("nnnnbssd"), st.integers(0, 3)), max_size=60)
options = st.fixed_dictionaries(
    {
        "size": st.integers(1, 20),
        "batch_size": st.integers(1, 5),
        "partition": st.booleans(),
        "parts": st.integers(1, 4),
    }
)


def positions(spans: list[Span]) -> list[tuple[int, int]]:
    return sorted((span.epoch, each) for span in spans for each in range(span.start, span.stop))


@settings(max_examples=300, deadline=None)
@given(options, moves, st.booleans())
def test_every_position_is_in_one_place(
    chosen: dict[str, int], script: list[tuple[str, int]], again: bool
) -> None:
    """Handed out once, unless it came back; an epoch is done when all of it is settled."""
    stock = EpochPositions(**chosen)
    stock.begin(0, {0, 1})
    held: list[Span] = []
    settled: list[Span] = []
    for move, which in script:
        if move == "n" and (span := stock.next(0, which)):
            assert span.stop - span.start <= chosen["batch_size"]
            held.append(span)
        elif move == "b" and held:
            stock.give_back([held.pop(which % len(held))])
            assert stock.returned and stock.has(0)
        elif move == "s" and held:
            settled.append(held.pop(which % len(held)))
            stock.settle(settled[-1])
        elif move == "d":
            stock.disown(which)
            assert not stock.owns(which)
        assert stock.left(0) == chosen["size"] - len(positions(settled))
        assert stock.over == (stock.left(0) == 0)
    standing = stock.standing(held)
    if again:
        stock, held = EpochPositions(**chosen, standing=standing), []
        assert chosen["partition"] or stock.standing([]) == standing
        stock.adopt({0, 1})
    while span := next((span for rank in range(4) if (span := stock.next(0, rank))), None):
        held.append(span)
    assert positions(held + settled) == [(0, each) for each in range(chosen["size"])]
    for span in held:
        assert not stock.finish()
        stock.settle(span)
    assert stock.finish() == [EpochDone(0)] and stock.done == 1 and stock.finish() == []


@settings(max_examples=100, deadline=None)
@given(options, st.integers(0, 6))
def test_what_nobody_wants_is_skipped(chosen: dict[str, int], taken: int) -> None:
    stock = EpochPositions(**chosen)
    stock.begin(1, {0})
    given_out = [span for _ in range(taken) if (span := stock.next(0, 0))]
    stock.give_back(given_out[1:])
    stock.skip(0)
    assert not any(stock.next(0, rank) for rank in range(4) if not stock.owns(rank)) or chosen["partition"]
    for span in given_out[:1]:
        stock.settle(span)
    count = len(positions(given_out[:1]))
    assert stock.finish() == [EpochDone(0, chosen["size"] - count)]
    assert stock.left(1) == chosen["size"]

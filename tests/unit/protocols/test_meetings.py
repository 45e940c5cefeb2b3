"""Meetings (M8): over when all have come or left, or when nobody else can come; never for ever, wherever they wait."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.protocols.meetings import (
    EPOCH,
    LOADER,
    STEP,
    TABLE,
    Decision,
    MeetingPlace,
    Meetings,
    Met,
    Uncross,
)

many = settings(max_examples=500, deadline=None)
FIRST = (0, 1, 2)
PLACES = {"w": MeetingPlace(EPOCH, 0), "t": MeetingPlace(TABLE, 1), "o": MeetingPlace(LOADER, 1)}
moves = st.lists(st.tuples(st.sampled_from("cccwwtogjl"), st.integers(0, 5)), max_size=60)


@dataclass
class Crew:
    """Learners that come to meetings, wait elsewhere and go on, join and leave; counts for itself."""

    apart: bool = False
    members: set[int] = field(default_factory=lambda: set(FIRST))
    together: set[int] = field(default_factory=set)  # those of them whose loops began together
    here: set[int] = field(default_factory=set)
    elsewhere: dict[int, MeetingPlace] = field(default_factory=dict)
    over: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meetings = Meetings(FIRST, apart=self.apart)
        self.together = set() if self.apart else set(FIRST)

    def move(self, name: str, learner: int) -> None:
        busy = learner in self.members - self.here - self.elsewhere.keys()
        if name == "j" and learner not in self.members:
            self.members.add(learner)
            self.meetings.join(learner)
        elif name == "l" and learner in self.members:
            for each in (self.members, self.here, self.together):
                each.discard(learner)
            self.elsewhere.pop(learner, None)
            self.see(self.meetings.leave(learner), stood=False)
        elif name == "c" and busy:
            self.here.add(learner)
            self.see(self.meetings.come(learner), stood=False)
        elif name in PLACES and busy:
            self.elsewhere[learner] = PLACES[name]
        elif name == "g":
            self.elsewhere.pop(learner, None)
        self.see(self.meetings.stand_still(dict(self.elsewhere)), stood=True)
        assert self.meetings.here == self.here
        still = not self.members - self.here - self.elsewhere.keys()
        assert self.meetings.still(self.elsewhere) == still
        if still and self.members:  # nobody can go on, but those for whom an epoch begins
            epoch = {each for each, place in self.elsewhere.items() if place == PLACES["w"]}
            assert not self.here and epoch and not self.splits(epoch)

    def splits(self, going: set[int]) -> bool:
        """Some whose loops began together would go on without others of them."""
        return bool(self.together & going and self.together - going)

    def see(self, decisions: Iterable[Decision], *, stood: bool) -> None:
        for decision in decisions:
            assert not isinstance(decision, Uncross) and set(decision.learners) == self.here
            others = self.members - self.here
            if not stood:
                assert self.here and not decision.others and not others  # all have come or left
            else:
                assert others and others <= self.elsewhere.keys()
                assert bool(decision.others) == (not self.here or self.splits(self.here))
            self.over.append(decision)
            self.here.clear()
            if decision.others:
                assert dict(decision.others) == {each: self.elsewhere[each] for each in others}
                self.elsewhere.clear()  # they are told, and end
                for each in others:
                    self.members.discard(each)
                    self.together.discard(each)
                    assert self.meetings.leave(each) == []


@many
@given(moves, st.booleans())
def test_a_meeting_is_over_when_nobody_else_can_come(script: list[tuple[str, int]], apart: bool) -> None:
    crew = Crew(apart)
    for name, learner in script:
        crew.move(name, learner)


@many
@given(moves)
def test_who_began_together_meets_together_whoever_joins(script: list[tuple[str, int]]) -> None:
    """Two of them come equally often; a third came later and does as it likes: every meeting is of both, or of neither."""
    meetings, calls, waits = Meetings((0, 1)), {0: 0, 1: 0}, False
    meetings.join(2)
    over = 0

    def see(decisions: list[Decision]) -> None:
        nonlocal over
        for decision in decisions:
            assert isinstance(decision, Met) and len({0, 1} & set(decision.learners)) in (0, 2)
            over += 0 in decision.learners

    for name, learner in script:
        if learner in calls and calls[learner] == over:
            calls[learner] += 1
            see(meetings.come(learner))
        elif learner == 2 and name == "w":
            waits = 2 not in meetings.here
        elif learner == 2 and name == "g":
            waits = False
        elif learner == 2 and name == "c" and not waits:
            see(meetings.come(2))
        see(meetings.stand_still({2: PLACES["w"]} if waits else {}))
    assert over == min(calls.values()) or not waits


@many
@given(moves)
def test_learners_that_began_together_and_come_equally_often_meet_all_together(
    script: list[tuple[str, int]],
) -> None:
    """Whatever the order: no meeting of a part of them, and nobody is refused."""
    meetings, calls = Meetings(FIRST), dict.fromkeys(FIRST, 0)
    over = 0
    for _, learner in script:
        if learner in calls and calls[learner] == over:
            calls[learner] += 1
            decisions = meetings.come(learner)
            assert meetings.stand_still({}) == []
            over += len(decisions)
            assert all(decision == Met(decision.learners) for decision in decisions)
            assert all(sorted(decision.learners) == list(FIRST) for decision in decisions)
    assert over == min(calls.values())


def test_nobody_is_waited_for_before_it_is_there() -> None:
    """A warm start holds it back; when that is over it counts, and has met less often."""
    meetings = Meetings([0])
    assert meetings.come(0) == [Met((0,))]
    meetings.join(1)
    assert meetings.come(0) == []
    assert meetings.stand_still({1: PLACES["w"]}) == [Met((0,))]


def test_who_was_expected_and_is_held_back_completes_a_meeting() -> None:
    meetings = Meetings([0])
    assert meetings.come(1) == []  # it is the first at the table, in place of 0
    assert meetings.leave(0) == [Met((1,))]


def test_the_empty_meeting_is_never_held() -> None:
    meetings = Meetings()
    assert meetings.leave(3) == [] and meetings.stand_still({1: PLACES["w"], 2: PLACES["w"]}) == []


def test_with_a_joiner_learners_that_began_together_and_meet_unequally_often_are_told() -> None:
    meetings = Meetings(FIRST)
    meetings.join(7)
    meetings.come(0)
    meetings.come(7)
    assert meetings.stand_still({1: PLACES["w"], 2: PLACES["w"]}) == [
        Met((0, 7), ((1, PLACES["w"]), (2, PLACES["w"])))
    ]


def test_loops_that_wait_in_three_places_differ() -> None:
    meetings = Meetings(FIRST)
    assert meetings.come(1) == []
    assert meetings.stand_still({0: PLACES["w"]}) == []
    assert meetings.stand_still({0: PLACES["w"], 2: PLACES["t"]}) == [
        Met((1,), ((0, PLACES["w"]), (2, PLACES["t"])))
    ]


STEPS = {0: MeetingPlace(STEP, 0), 1: MeetingPlace(STEP, 1), 2: MeetingPlace(STEP, 1)}


def test_steps_of_several_tables_that_began_together_differ() -> None:
    assert Meetings(FIRST).stand_still(STEPS) == [Met((), tuple(STEPS.items()))]
    meetings = Meetings((*FIRST, 3))
    meetings.come(3)
    assert meetings.stand_still(STEPS) == [Met((3,), tuple(STEPS.items()))]
    assert not meetings.here


def test_who_came_later_is_not_waited_for_in_another_table() -> None:
    """A joiner steps the first table and the others the second, or the other way round; or all went back to a checkpoint."""
    meetings = Meetings((1, 2))
    meetings.join(0)
    assert meetings.stand_still(STEPS) == [Uncross(1)]
    meetings = Meetings((0,))
    meetings.join(1)
    meetings.join(2)
    assert meetings.stand_still(STEPS) == [Uncross(0)]
    assert Meetings(FIRST, apart=True).stand_still(STEPS) == [Uncross(0)]


def test_steps_of_one_table_are_no_standstill_of_their_own() -> None:
    """Its updates wait for nobody that rests, and all others do."""
    meetings = Meetings((0, 1))
    assert meetings.stand_still({0: STEPS[0]}) == []

"""Meetings (M8): over when all have come or left, or when nobody else can come; never for ever."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.protocols.meetings import Decision, Meetings, Met, Unmet

many = settings(max_examples=500, deadline=None)
FIRST = (0, 1, 2)
moves = st.lists(st.tuples(st.sampled_from("cccwwgjl"), st.integers(0, 5)), max_size=60)


@dataclass
class Crew:
    """Learners that come to meetings, wait elsewhere and go on, join and leave; counts for itself."""

    apart: bool = False
    members: set[int] = field(default_factory=lambda: set(FIRST))
    here: set[int] = field(default_factory=set)
    elsewhere: set[int] = field(default_factory=set)
    late: bool = False
    over: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meetings = Meetings(FIRST, apart=self.apart)

    def move(self, name: str, learner: int) -> None:
        busy = learner in self.members - self.here - self.elsewhere
        if name == "j" and learner not in self.members:
            self.late = True
            self.members.add(learner)
            self.meetings.join(learner)
        elif name == "l" and learner in self.members:
            for each in (self.members, self.here, self.elsewhere):
                each.discard(learner)
            self.see(self.meetings.leave(learner), stood=False)
        elif name == "c" and busy:
            self.here.add(learner)
            self.see(self.meetings.come(learner), stood=False)
        elif name == "w" and busy:
            self.elsewhere.add(learner)
        elif name == "g":
            self.elsewhere.discard(learner)
        self.see(self.meetings.stand_still(set(self.elsewhere)), stood=True)
        assert self.meetings.here == self.here
        assert not self.here or self.members - self.here - self.elsewhere  # somebody can still come

    def see(self, decisions: Iterable[Decision], *, stood: bool) -> None:
        for decision in decisions:
            assert set(decision.learners) == self.here and self.here
            others = self.members - self.here
            if not stood:
                assert isinstance(decision, Met) and not others  # all have come or left
            else:
                assert others and others <= self.elsewhere
                together = not (self.late or self.apart)
                assert isinstance(decision, Unmet) == together
                if isinstance(decision, Unmet):
                    assert set(decision.others) == others
            self.over.append(decision)
            self.here.clear()


@many
@given(moves, st.booleans())
def test_a_meeting_is_over_when_nobody_else_can_come(script: list[tuple[str, int]], apart: bool) -> None:
    crew = Crew(apart)
    for name, learner in script:
        crew.move(name, learner)


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
            assert meetings.stand_still(set()) == []
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
    assert meetings.stand_still({1}) == [Met((0,))]


def test_who_was_expected_and_is_held_back_completes_a_meeting() -> None:
    meetings = Meetings([0])
    assert meetings.come(1) == []  # it is the first at the table, in place of 0
    assert meetings.leave(0) == [Met((1,))]


def test_the_empty_meeting_is_never_held() -> None:
    meetings = Meetings()
    assert meetings.leave(3) == [] and meetings.stand_still({1, 2}) == []

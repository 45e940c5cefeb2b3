"""The end of the last epoch (M7): who is let go of those that wait is what a plain search over all learners finds."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from syncline.protocols.epoch_positions import Decision, End, Grant
from syncline.protocols.ledger import Ledger
from tests.unit.protocols.test_ledger import Team, call, teams

many = settings(max_examples=300, deadline=None)
NAMES = ["ask", "ask", "ask", "ask", "taken", "settled", "block", "block", "block", "close", "leave", "join"]
NEVER = 1 << 30  # an index that no answer has yet


class PlainLedger(Ledger):
    """Looks at everybody, each time."""

    def _release_held(self) -> None:
        while self._held and not self._found():
            blocked = [member for member in self._held.values() if member.blocked]
            if not blocked:
                return
            self._end(next((member for member in reversed(blocked) if self._may_return(member)), blocked[-1]))

    def _found(self) -> bool:
        return any(
            self._may_return(member) and not (member.blocked and member.id in self._held)
            for member in self._learners.values()
        )


@many
@given(teams(changes=True))
def test_whole_runs_end_as_with_a_plain_search(team: Team) -> None:
    team.run()
    plain = PlainLedger(**team.options)
    assert [call(plain, name, *values) for name, values in team.events] == team.heard


@many
@given(st.randoms(use_true_random=False), st.booleans(), st.booleans(), st.integers(1, 2), st.integers(1, 12))
def test_any_events_give_the_decisions_of_a_plain_search(
    chance: Random, lockstep: bool, partition: bool, epochs: int, size: int
) -> None:
    options: dict[str, Any] = {"size": size, "batch_size": 2, "epochs": epochs, "learners": 4}
    options |= {"lockstep": lockstep, "partition": partition}
    quick, plain = Ledger(**options), PlainLedger(**options)
    joined = 0
    said: list[Decision] = []
    for _ in range(100):
        name, learner = chance.choice(NAMES), chance.randrange(max(1, joined))
        if name == "join" or joined < 4:
            assert quick.join(joined, joined) == plain.join(joined, joined)
            joined += 1
        elif learner in quick:
            epoch = max(quick.epoch(learner), chance.randrange(epochs))
            more = {"ask": [epoch], "block": [NEVER], "leave": []}.get(name, [chance.randrange(4)])
            decisions = call(quick, name, learner, *more)
            assert decisions == call(plain, name, learner, *more) and quick.waiting() == plain.waiting()
            said += decisions
    event(f"held ones ended: {sum(isinstance(each, End) for each in said) > 1}")


def test_the_end_of_many_costs_each_learner_once() -> None:
    """Thousands that wait for the last batches of thousands: counted, not timed."""
    looked = 0

    class Counting(Ledger):
        def _may_return(self, member: Any) -> bool:
            nonlocal looked
            looked += 1
            return super()._may_return(member)

    count = 2000
    ledger = Counting(size=2 * count, batch_size=2, epochs=1, learners=count)
    for learner in range(count):
        ledger.join(learner, learner)
    grants = [each for learner in range(count) for each in ledger.ask(learner, 0)]
    assert len(grants) == count and all(isinstance(each, Grant) for each in grants)
    assert not any(ledger.ask(learner, 0) for learner in range(count))
    said: list[Decision] = []
    for learner in range(count):
        said += ledger.taken(learner, 1) + ledger.settled(learner, 1) + ledger.block(learner, 1)
    assert sum(isinstance(each, End) for each in said) == count
    assert looked < 10 * count

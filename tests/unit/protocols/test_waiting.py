"""The sorted gate against one that looks at everybody, and the counted members against counting (hypothesis)."""

from hypothesis import given
from hypothesis import strategies as st

from syncline.dial import Sync
from syncline.protocols.membership import Members
from syncline.protocols.waiting import RESTS, Gate, Release

DIALS = [
    "hardsync",
    "softsync:1",
    "async",
    "ssp:0",
    "ssp:2",
    "backup:1",
    "delayed:2",
    "downpour:push=2,fetch=2",
]
LEARNERS = 5
events = st.tuples(
    st.sampled_from(
        [
            "arrive",
            "arrive",
            "arrive",
            "silent",
            "drop",
            "hold",
            "resume",
            "fetch",
            "leave",
            "join",
            "fold",
            "dial",
        ]
    ),
    st.integers(1, LEARNERS),
    st.sampled_from(DIALS),
)


class PlainGate:
    """Looks at everybody, every time."""

    def __init__(self, sync: Sync, members: Members) -> None:
        self._members = members
        # learner -> (ticket number, version it needs, whether it only wants its slot back)
        self.waiting: dict[int, tuple[int, int, bool]] = {}
        self._last: dict[int, int] = {}  # learner -> the version it read last
        self._rested: set[int] = set()  # resumed, and not let go yet
        self.change(sync, 0)

    def change(self, sync: Sync, version: int) -> None:
        """Another dial from this version on: all that was published is folded, who waits for that goes on."""
        self._lockstep, self._delay, self._slack = sync.lockstep, sync.delay, sync.slack
        self._own_fold, self._waits = sync.lead == 0, sync.waits
        self._base = version  # versions before it are not kept
        self._rested.clear()
        self._last.clear()
        self.waiting = {
            learner: (number, version if needed != RESTS else RESTS, silent)
            for learner, (number, needed, silent) in self.waiting.items()
        }

    def arrive(self, learner: int, number: int, iteration: int, version: int, silent: bool = False) -> None:
        """It has published its gradient of this iteration, taken at this version; a silent one goes with its fold."""
        if self._lockstep:
            needed = max(self._base, iteration + 1 - (0 if silent else self._delay))
        else:
            needed = version + 1 if self._own_fold else 0
        self._wait(learner, number, needed, silent)

    def let_go(self, learner: int, number: int, iteration: int, silent: bool) -> None:
        """Its gradient was dropped: it reads what it would have read after the one before."""
        self._wait(learner, number, max(self._base, iteration - self._delay) if self._lockstep else 0, silent)

    def hold(self, learner: int, number: int) -> None:
        """It rests until `resume`."""
        self._wait(learner, number, RESTS, False)

    def _wait(self, learner: int, number: int, needed: int, silent: bool) -> None:
        """A ticket's release is that of all before it: what one of those was to read comes with the last one."""
        last, _, silent_before = self.waiting.get(learner, (-1, 0, True))
        if last < number:
            self.waiting[learner] = (number, needed, silent and silent_before)

    def rests_since(self, learner: int, number: int) -> bool:
        """It rests with a later ticket than this one, which came before the start."""
        last, needed, _ = self.waiting.get(learner, (-1, 0, True))
        return needed == RESTS and last > number

    def resume(self, learner: int, iteration: int) -> None:
        """It goes on with this iteration: it reads what it would have read after the one before."""
        number, needed, silent = self.waiting.get(learner, (0, 0, False))
        if needed == RESTS:
            wanted = max(self._base, iteration - self._delay) if self._lockstep else 0
            self.waiting[learner] = (number, wanted, silent)
            if not self._waits and learner in self._last:
                self._rested.add(
                    learner
                )  # nobody waited: it goes on with what it has, as if it had not rested

    def fetched(self, learner: int, version: int) -> None:
        """It reads this version without waiting."""
        self._last[learner] = version

    def leave(self, learner: int) -> None:
        self.waiting.pop(learner, None)
        self._last.pop(learner, None)
        self._rested.discard(learner)

    def open(self, version: int) -> list[Release]:
        """Everybody whose version is there and who is not too far ahead, in the order of arrival."""
        if not self.waiting:
            return []
        free = [learner for learner, (_, needed, _) in self.waiting.items() if 0 <= needed <= version]
        if self._slack is not None and free:
            furthest = (self._members.slowest or 0) + self._slack
            free = [learner for learner in free if self._members.live[learner].clock <= furthest]
        releases = []
        for learner in free:
            number, needed, silent = self.waiting.pop(learner)
            if learner in self._rested:
                self._rested.discard(learner)
                releases.append(Release(learner, number, self._last[learner], same=True))
                continue
            read = needed if self._lockstep else version
            releases.append(Release(learner, number, read, not silent))
            if not silent:
                self._last[learner] = read
        return releases


def check(members: Members) -> None:
    active = members.active()
    assert members.present == len(active)
    assert members.slowest == min((member.clock for member in active), default=None)


@given(st.sampled_from(DIALS), st.lists(events, max_size=80))
def test_the_gate_is_the_plain_one(first: str, script: list[tuple[str, int, str]]) -> None:
    members = Members({learner: learner for learner in range(1, LEARNERS + 1)})
    for learner in range(1, LEARNERS + 1):
        members.join(learner, learner, 0)
    gates = [Gate(Sync.parse(first), members), PlainGate(Sync.parse(first), members)]
    numbers = dict.fromkeys(range(1, LEARNERS + 1), 0)
    version = 0
    for event, learner, dial in script:
        member = members.live.get(learner)
        if event == "fold":
            version += 1
        elif event == "dial":
            members.restart(version)
            for gate in gates:
                gate.change(Sync.parse(dial), version)
        elif event == "join" and member is None:
            members.join(learner, learner, version)
        elif member is not None and event != "join":
            numbers[learner] += 1
            number = numbers[learner]
            if event in ("arrive", "silent"):
                if member.resting:
                    members.rouse(member)
                members.step(member)
                member.next_iteration += 1
            elif event == "hold":
                members.rest(member)
            elif event == "resume" and member.resting:
                members.rouse(member)
            elif event == "leave":
                members.leave(learner)
            for gate in gates:
                if event in ("arrive", "silent"):
                    gate.arrive(learner, number, member.next_iteration - 1, version, event == "silent")
                elif event == "drop":
                    gate.let_go(learner, number, member.next_iteration, False)
                elif event == "hold":
                    gate.hold(learner, number)
                elif event == "resume":
                    gate.resume(learner, member.next_iteration)
                elif event == "fetch":
                    gate.fetched(learner, version)
                elif event == "leave":
                    gate.leave(learner)
        check(members)
        sorted_one, plain = (gate.open(version) for gate in gates)
        assert sorted_one == plain
        assert gates[0].waiting == gates[1].waiting


# -- one gate, step by step ----------------------------------------------------------------------------------


def gate_of(text: str, *learners: int) -> Gate:
    members = Members(dict(enumerate(learners)))
    for rank, learner in enumerate(learners):
        members.join(learner, rank, 0)
    return Gate(Sync.parse(text), members)


def needs(gate: Gate) -> dict[int, int]:
    return {learner: needed for learner, (_, needed, _) in gate.waiting.items()}


def test_the_gate_opens_for_exactly_the_version_that_lockstep_needs() -> None:
    gate = gate_of("delayed:2", 3, 4, 5)
    for learner, iteration in ((5, 4), (3, 3), (4, 0)):
        gate.arrive(learner, 10 + learner, iteration, 0)
    assert needs(gate) == {5: 3, 3: 2, 4: 0}
    assert gate.open(1) == [Release(4, 14, 0)]
    assert gate.open(3) == [Release(5, 15, 3), Release(3, 13, 2)]  # in the order of arrival
    assert gate.open(9) == [] and gate.waiting == {}


def test_the_gate_is_open_for_free_learners_and_shut_for_resting_ones() -> None:
    gate = gate_of("async", 1, 2, 3)
    gate.arrive(1, 4, 0, 7)
    gate.hold(2, 5)
    assert gate.open(7) == [Release(1, 4, 7)] and needs(gate) == {2: -1}
    gate.resume(2, 7)
    assert gate.open(7) == [Release(2, 5, 7)]
    gate.hold(3, 0)
    gate.leave(3), gate.leave(8)
    gate.resume(3, 7)
    assert gate.open(7) == [] and gate.waiting == {}


def test_the_gate_resumes_a_learner_where_it_would_read_after_the_step_before() -> None:
    gate = gate_of("delayed:1", 1)
    gate.hold(1, 3)
    assert gate.open(99) == []
    gate.resume(1, 6)
    assert gate.open(4) == [] and gate.open(8) == [Release(1, 3, 5)]

"""Who computes which portion: examples of every rule, random runs with deaths and joins, and stragglers in virtual time."""

import heapq
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from syncline.batch.portions import Assign, Cancel, Decision, Discard, Done, Gaps, Portions, Statistics, Take
from syncline.errors import RunError, UsageError


def team(size: int, portions: int, **options: Any) -> tuple[Portions, list[Assign]]:
    """A team at the begin of evaluation 0, and what each got."""
    batch = Portions(**({"every": 2, "ahead": 0} | options))
    for learner in range(size):
        assert batch.join(learner) == []
    return batch, assigned(batch.begin(0, portions))


def assigned(decisions: Iterable[Decision]) -> list[Assign]:
    return [d for d in decisions if isinstance(d, Assign)]


def spans(decisions: Iterable[Decision]) -> list[tuple[int, int, int]]:
    return [(d.learner, d.start, d.stop) for d in assigned(decisions)]


def answer(batch: Portions, task: Assign) -> list[Decision]:
    return batch.answer(task.learner, task.evaluation, task.task)


# -- who gets what --------------------------------------------------------------------------------------------


def test_learners_begin_apart_and_go_on_with_the_neighbours_of_what_they_had() -> None:
    batch, tasks = team(4, 64)
    assert spans(tasks) == [(0, 0, 2), (1, 33, 35), (2, 17, 19), (3, 49, 51)]
    for _ in range(3):
        tasks = [assigned(answer(batch, task))[0] for task in tasks]
    assert spans(tasks) == [(0, 6, 8), (1, 39, 41), (2, 23, 25), (3, 55, 57)]


def test_in_the_next_evaluation_they_begin_where_they_began() -> None:
    batch, tasks = team(3, 12)
    begun = {task.learner: task.start for task in tasks}
    queue, decisions = deque(tasks), list[Decision]()
    while Done(0) not in decisions:
        decisions = answer(batch, queue.popleft())
        queue.extend(assigned(decisions))
    while queue:  # copies
        answer(batch, queue.popleft())
    again = batch.begin(1, 12)
    assert {d.learner: d.start for d in assigned(again)} == begun
    assert all(d.evaluation == 1 for d in assigned(again))


def test_tasks_get_shorter_towards_the_end() -> None:
    batch, tasks = team(2, 24, every=4)
    lengths, queue = [], deque(tasks)
    while queue:
        task = queue.popleft()
        lengths.append(task.stop - task.start)
        queue.extend(assigned(answer(batch, task)))
    assert lengths[:2] == [4, 4] and lengths == sorted(lengths, reverse=True) and lengths[-4:] == [1] * 4


def test_a_learner_holds_tasks_ahead_while_there_are_plenty() -> None:
    _, tasks = team(2, 40, ahead=1)
    assert spans(tasks) == [(0, 0, 2), (1, 21, 23), (0, 2, 4), (1, 23, 25)]
    _, tasks = team(2, 3, ahead=1)
    assert [task.learner for task in tasks] == [0, 1]


def test_one_portion_is_computed_by_one_and_copied_by_the_others() -> None:
    batch, tasks = team(5, 1, copies=3)
    assert spans(tasks) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    decisions = answer(batch, tasks[1])
    assert decisions == [Cancel(0, 0, 1), Cancel(2, 0, 3), Take(1, 0, 2), Done(0)]
    assert answer(batch, tasks[0]) == [Discard(0, 0, 1)]  # it did not hear in time
    assert batch.statistics() == Statistics(taken=1, discarded=1, copied=2, returned=0)


def test_without_copies_nobody_is_given_what_another_has() -> None:
    batch, tasks = team(3, 1, copies=1)
    assert spans(tasks) == [(0, 0, 1)]
    assert spans(batch.leave(0)) == [(1, 0, 1)]


# -- first answers, deaths, other evaluations ------------------------------------------------------------------


def test_a_sum_with_a_portion_that_counts_already_is_cancelled_and_its_rest_goes_back() -> None:
    batch, tasks = team(2, 8, every=2, copies=2)  # learner 0 straggles with a task of two
    slow, fast = tasks
    assert slow.stop - slow.start == 2
    while True:
        decisions = answer(batch, fast)
        (fast,) = (d for d in assigned(decisions) if d.learner == 1)
        if fast.start == slow.start:
            break
    decisions = answer(batch, fast)
    assert Cancel(0, 0, slow.task) in decisions
    assert spans(decisions) == [(1, slow.start + 1, slow.stop)]  # the rest
    assert answer(batch, slow)[0] == Discard(0, 0, slow.task)
    assert Done(0) in answer(batch, assigned(decisions)[0])


def test_what_a_dead_learner_had_not_answered_goes_back_and_nothing_else() -> None:
    batch, tasks = team(2, 6, every=2, copies=1, ahead=1)
    first = next(task for task in tasks if task.learner == 0)
    answer(batch, first)
    lost = {(d.start, d.stop) for d in tasks if d.learner == 0 and d is not first}
    decisions = batch.leave(0)
    assert batch.leave(0) == []  # told twice
    assert answer(batch, first)[0] == Discard(0, 0, first.task)  # it counts already, or came too late
    seen: set[int] = set()
    queue = deque(d for d in [*tasks, *assigned(decisions)] if d.learner == 1)
    while queue:
        task = queue.popleft()
        seen |= set(range(task.start, task.stop))
        decisions = answer(batch, task)
        queue.extend(assigned(decisions))
    assert Done(0) in decisions
    assert seen == set(range(6)) - set(range(first.start, first.stop))
    assert all(set(range(*span)) <= seen for span in lost)


def test_answers_of_another_evaluation_are_discarded_and_counted() -> None:
    batch, (task, *_) = team(2, 8)
    begun = batch.begin(5, 8)
    assert Cancel(0, 0, task.task) in begun and assigned(begun) == []  # both still have what is cancelled
    assert answer(batch, task)[0] == Discard(0, 0, task.task)
    assert batch.statistics().discarded == 1


def test_an_answer_counts_only_from_whom_it_was_asked_and_once() -> None:
    batch, tasks = team(2, 8)
    task = tasks[0]
    for learner, evaluation in ((1, 0), (0, 7), (9, 0)):
        assert batch.answer(learner, evaluation, task.task) == [Discard(learner, evaluation, task.task)]
    assert answer(batch, task)[0] == Take(0, 0, task.task)
    assert answer(batch, task) == [Discard(0, 0, task.task)]
    assert batch.statistics() == Statistics(taken=1, discarded=4)


def test_when_who_has_a_copy_dies_another_gets_one() -> None:
    batch, tasks = team(2, 1, copies=2)
    assert spans(tasks) == [(0, 0, 1), (1, 0, 1)]
    assert batch.join(2) == []
    assert spans(batch.leave(1)) == [(2, 0, 1)]


def test_who_drops_a_task_is_free_and_its_portions_go_back() -> None:
    batch, tasks = team(1, 2)
    assert spans(tasks) == [(0, 0, 1)]
    second = batch.drop(0, 0, tasks[0].task)
    assert spans(second) == [(0, 1, 2)]
    assert batch.drop(0, 0, 999) == []  # unknown
    assert spans(answer(batch, assigned(second)[0])) == [(0, 0, 1)]


def test_when_all_have_died_the_next_to_join_goes_on() -> None:
    batch, tasks = team(2, 2, every=1)
    answer(batch, tasks[0])
    batch.leave(0), batch.leave(1)
    assert spans(batch.join(7)) == [(7, tasks[1].start, tasks[1].stop)]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="portions need every >= 1, got every = 0"):
        Portions(every=0)
    batch, _ = team(1, 3)
    with pytest.raises(UsageError, match="at least one portion, got 0"):
        batch.begin(1, 0)
    with pytest.raises(RunError, match="evaluation 0 begins after 0"):
        batch.begin(0, 3)
    with pytest.raises(RunError, match="learner 0 joins twice"):
        batch.join(0)


# -- the same bits whoever computes ---------------------------------------------------------------------------


def test_deterministic_chunks_are_fixed_and_taken_in_their_order() -> None:
    batch, tasks = team(3, 8, every=3, deterministic=True)
    assert spans(tasks) == [(0, 0, 3), (1, 3, 6), (2, 6, 8)]
    assert [d for d in answer(batch, tasks[2]) if isinstance(d, Take)] == []
    assert [d for d in answer(batch, tasks[1]) if isinstance(d, Take)] == []
    last = answer(batch, tasks[0])
    assert [d.task for d in last if isinstance(d, Take)] == [1, 2, 3] and last[-1] == Done(0)


def test_deterministic_sums_that_wait_are_at_most_the_window() -> None:
    batch, tasks = team(2, 20, every=1, deterministic=True, window=3, copies=1)
    (second,) = (task for task in tasks if task.learner == 1)
    third = assigned(answer(batch, second))
    assert spans(third) == [(1, 2, 3)]
    assert answer(batch, third[0]) == []  # 0 is out, 1 and 2 wait
    assert spans(answer(batch, tasks[0])) == [(1, 3, 4), (0, 4, 5)]


def test_sums_that_wait_for_an_abandoned_evaluation_are_discarded() -> None:
    batch, tasks = team(2, 8, every=2, deterministic=True)
    assert [d for d in answer(batch, tasks[1]) if not isinstance(d, Assign)] == []
    assert Discard(1, 0, tasks[1].task) in batch.begin(1, 8)


# -- any order of messages, deaths, joins ---------------------------------------------------------------------


@dataclass
class Simulation:
    """Learners with inboxes; what they say is on its way, in order for each, until it is heard."""

    batch: Portions
    random: random.Random
    most: int  # copies
    live: dict[int, Assign] = field(
        default_factory=dict
    )  # neither answered nor cancelled, nor is its learner gone
    inbox: dict[int, deque[Assign]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    said: dict[int, deque[tuple[bool, Assign]]] = field(default_factory=dict)  # (summed, task), not heard yet
    task: dict[int, Assign] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)  # tasks whose sums came
    taken: list[Assign] = field(default_factory=list)
    discarded: int = 0
    answers: int = 0
    done: int = -1

    def hear(self, decisions: list[Decision]) -> None:
        for d in decisions:
            match d:
                case Assign():
                    self.task[d.task] = d
                    self.live[d.task] = d
                    together = [t for t in self.live.values() if t.start < d.stop and d.start < t.stop]
                    assert len(together) <= self.most and [t.learner for t in together].count(d.learner) == 1
                    if d.learner in self.inbox:
                        self.inbox[d.learner].append(d)
                case Cancel():
                    self.cancelled.add(d.task)
                    del self.live[d.task]
                case Take():
                    assert self.task[d.task].learner == d.learner and d.task in self.heard
                    self.taken.append(self.task[d.task])
                case Discard():
                    self.discarded += 1
                case Done():
                    self.done = d.evaluation

    def join(self) -> None:
        learner = len(self.said)
        self.inbox[learner], self.said[learner] = deque(), deque()
        self.hear(self.batch.join(learner))

    def die(self, learner: int) -> None:
        """What it said before may be heard before, or after."""
        del self.inbox[learner]
        while self.said[learner] and self.random.random() < 0.5:
            self.listen(learner)
        self.live = {number: task for number, task in self.live.items() if task.learner != learner}
        self.hear(self.batch.leave(learner))

    def work(self, learner: int) -> None:
        task = self.inbox[learner].popleft()
        drops = task.task in self.cancelled and self.random.random() < 0.7
        self.said[learner].append((not drops, task))

    def listen(self, learner: int) -> None:
        summed, task = self.said[learner].popleft()
        if summed:
            self.answers += 1
            self.heard.add(task.task)
            self.live.pop(task.task, None)
            self.hear(self.batch.answer(learner, task.evaluation, task.task))
        else:
            self.hear(self.batch.drop(learner, task.evaluation, task.task))

    def choices(self) -> list[tuple[str, int]]:
        works = [("work", learner) for learner, tasks in self.inbox.items() if tasks]
        return works + [("listen", learner) for learner, said in self.said.items() if said]

    def covered(self, evaluation: int) -> list[int]:
        mine = [task for task in self.taken if task.evaluation == evaluation]
        return [portion for task in mine for portion in range(task.start, task.stop)]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    learners=st.integers(1, 6),
    portions=st.integers(1, 40),
    every=st.integers(1, 5),
    copies=st.integers(1, 4),
    ahead=st.integers(0, 2),
    deterministic=st.booleans(),
    restless=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_every_portion_counts_once_in_any_order_of_messages_deaths_and_joins(
    seed: int,
    learners: int,
    portions: int,
    every: int,
    copies: int,
    ahead: int,
    deterministic: bool,
    restless: float,
) -> None:
    batch = Portions(every=every, copies=copies, ahead=ahead, deterministic=deterministic)
    world = Simulation(batch, random.Random(seed), copies)
    for _ in range(learners):
        world.join()
    for evaluation in range(3):
        abandoned = evaluation == 1 and world.random.random() < 0.3
        world.hear(batch.begin(evaluation, portions))
        changes = 30
        while world.done < evaluation:
            if changes and world.random.random() < restless:
                changes -= 1
                if world.random.random() < 0.5 or not world.inbox:
                    world.join()
                else:
                    world.die(world.random.choice(list(world.inbox)))
                continue
            if not world.inbox:
                world.join()
            choices = world.choices()
            assert choices, "somebody lives, something is left, and nobody does anything"
            name, learner = world.random.choice(choices)
            getattr(world, name)(learner)
            if abandoned and world.random.random() < 0.1:
                break
        else:
            covered = world.covered(evaluation)
            assert sorted(covered) == list(range(portions))
            if deterministic:
                assert covered == list(range(portions))
                assert all(t.start % every == 0 for t in world.taken)
        assert len(set(world.covered(evaluation))) == len(world.covered(evaluation))
    while world.choices():
        name, learner = world.random.choice(world.choices())
        getattr(world, name)(learner)
    counts = batch.statistics()
    assert counts.discarded == world.discarded
    assert world.answers == counts.taken + counts.discarded
    assert counts.taken == len(world.taken)
    event(f"discarded: {min(counts.discarded, 3)}, returned: {min(counts.returned, 3)}")


# -- time -----------------------------------------------------------------------------------------------------


def time_of_a_batch(slowness: list[float], portions: int, batches: int = 3, **options: Any) -> float:
    """Virtual seconds of the last of some batches: a portion takes a learner its slowness, messages nothing."""
    batch = Portions(**options)
    inbox: list[deque[Assign]] = [deque() for _ in slowness]
    busy, cancelled, clock, done = [False] * len(slowness), set[int](), list[tuple[float, int, int]](), -1

    def hear(decisions: list[Decision], now: float) -> None:
        nonlocal done
        for d in decisions:
            if isinstance(d, Assign):
                inbox[d.learner].append(d)
                start(d.learner, now, 0)
            elif isinstance(d, Cancel):
                cancelled.add(d.task)
            elif isinstance(d, Done):
                done = d.evaluation

    def start(learner: int, now: float, portion: int) -> None:
        if not busy[learner] and inbox[learner]:
            busy[learner] = True
            heapq.heappush(clock, (now + slowness[learner], learner, portion + 1))

    def step() -> float:
        """One portion of one learner ends; a task is cancelled between two portions."""
        now, learner, portion = heapq.heappop(clock)
        busy[learner], task = False, inbox[learner][0]
        if portion < task.stop - task.start and task.task not in cancelled:
            start(learner, now, portion)
            return now
        inbox[learner].popleft()
        says = batch.drop if task.task in cancelled else batch.answer
        hear(says(learner, task.evaluation, task.task), now)
        start(learner, now, 0)
        return now

    for learner in range(len(slowness)):
        batch.join(learner)
    begun = now = 0.0
    for evaluation in range(batches):
        begun = now
        hear(batch.begin(evaluation, portions), now)
        while done < evaluation:
            now = step()
    return now - begun


@pytest.mark.parametrize("every, ahead", [(1, 0), (4, 0), (4, 1), (8, 1)])
@pytest.mark.parametrize("portions", [16 * 16, 16 * 50])
def test_one_learner_ten_times_slower_among_sixteen_costs_a_batch_next_to_nothing(
    portions: int, every: int, ahead: int
) -> None:
    equal = time_of_a_batch([1.0] * 15, portions, every=every, ahead=ahead)
    with_straggler = time_of_a_batch([1.0] * 15 + [10.0], portions, every=every, ahead=ahead)
    assert with_straggler <= 1.15 * equal


def test_without_copies_the_straggler_is_waited_for() -> None:
    equal = time_of_a_batch([1.0] * 15, 256, every=4)
    assert time_of_a_batch([1.0] * 15 + [10.0], 256, every=4, copies=1, ahead=1) > 2 * equal


@pytest.mark.parametrize("ahead", [0, 1])
def test_deterministic_batches_do_not_wait_for_a_straggler_either(ahead: int) -> None:
    options: dict[str, Any] = {"every": 2, "deterministic": True, "ahead": ahead}
    equal = time_of_a_batch([1.0] * 15, 3200, **options)
    assert time_of_a_batch([1.0] * 15 + [10.0], 3200, **options) <= 1.05 * equal


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 5))))
def test_gaps_are_what_is_free_and_never_touch(moves: list[tuple[int, int]]) -> None:
    gaps, free = Gaps(20), set(range(20))
    for start, length in moves:
        rest = gaps.at(start)
        assert (rest is not None) == (start in free)
        if rest is None:
            gaps.give(start)
            free.add(start)
        else:
            stop = min(start + length, rest[1])
            gaps.take(start, stop)
            free -= set(range(start, stop))
        assert len(gaps) == len(free)
        ends = {gaps.at(number)[1] for number in free}  # type: ignore[index]
        assert free.isdisjoint(ends) and len(ends) == sum(number + 1 not in free for number in free)
        if free:
            assert gaps.lowest() == min(free)
            assert gaps.largest()[1] - gaps.largest()[0] == max(gaps.at(n)[1] - n for n in free)  # type: ignore[index]

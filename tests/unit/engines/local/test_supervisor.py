"""A run over servers, as its supervisor hears of it: whose end and whose words mean what, and what a caller is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syncline import messages as m
from syncline.dial import Sync
from syncline.engines.local import supervisor
from syncline.engines.local.host_interface import Host, Machines, Sites, Vitals
from syncline.engines.local.learner import CALLS, GENERATION, STOP
from syncline.engines.local.processes import Process
from syncline.engines.local.supervisor import Supervisor
from syncline.engines.local.table_memory import Mailbox
from syncline.engines.run import Storage
from syncline.errors import LearnerError, LostError, LostWarning, RunError
from syncline.protocols.lifecycle import MOST, Faults
from syncline.protocols.staleness import Staleness
from syncline.topologies import Servers
from tests.unit.engines.local.doubles import Children, Post, Story, lives, said_to, spec_of

FINISHED = m.Finished(m.Statistics(-1, steps={0: 7}))
DONE = (0, FINISHED)


def kinds(run: Supervisor) -> list[str]:
    return [event.kind for event in run.outcome.events]


def test_a_run_is_over_when_all_have_returned_and_the_leading_shard_has_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Supervisor(spec_of(2, Servers(2, True)))
    roles: list[tuple[str, int]] = []

    def story(children: Children) -> Story:
        roles.extend((each.role, each.rank) for each in children.by_pid.values())
        children.says("learner", 1, m.Returned("b"))
        yield
        assert not [each for each in said_to(children.of("shard")) if isinstance(each, m.Finish)]
        children.says("learner", 0, m.Returned("a"))
        yield
        assert said_to(children.of("shard"))[-1] == m.Finish(cut=True)
        children.says("shard", 0, DONE)

    children = lives(run, story, monkeypatch)
    assert roles == [("shard", 0), ("shard", 1), ("learner", 0), ("learner", 1)]
    assert run.error is None and run.outcome.returned == {0: "a", 1: "b"} and children.closed is False
    states = {(each.role, each.rank): each.state for each in run.outcome.statistics.processes}
    assert states["learner", 0] == states["learner", 1] == "returned"
    assert {each.rank: each.steps for each in run.outcome.statistics.processes if each.role == "learner"} == {
        0: 7,
        1: 0,
    }


def failing(monkeypatch: pytest.MonkeyPatch, *told: Any, **options: Any) -> tuple[Supervisor, BaseException]:
    """What a run of two learners and two shards fails with, when somebody has said this or (text) has ended."""
    run = Supervisor(spec_of(2, Servers(2, True), **options))

    def story(children: Children) -> Story:
        role, rank, what = told
        (children.ends if isinstance(what, str) else children.says)(role, rank, what)
        yield

    assert lives(run, story, monkeypatch).closed is True, "those that still run are ended"
    assert run.error is not None
    return run, run.error


@pytest.mark.parametrize(
    "role, rank, what, kind, words",
    [
        ("shard", 1, (1, m.ShardRaised(1, None, "the trace")), RunError, "shard 1 failed:\nthe trace"),
        (
            "shard",
            1,
            "signal SIGKILL",
            LostError,
            r"shard 1 \(pid 101\) ended with signal SIGKILL, and there is no checkpoint",
        ),
        ("learner", 1, m.Raised(ValueError("odd"), "the trace"), LearnerError, "ValueError: odd"),
    ],
)
def test_what_ends_a_run(
    role: str, rank: int, what: Any, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kind, match=words):
        raise failing(monkeypatch, role, rank, what)[1]


def test_a_lost_learner_is_missed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Supervisor(spec_of(2))

    def story(children: Children) -> Story:
        with pytest.warns(
            LostWarning,
            match="learner 0 lost: its process .* ended with signal SIGKILL; 1 other learner goes on",
        ):
            children.ends("learner", 0)
        yield
        left = [each for each in said_to(children.of("shard")) if isinstance(each, m.Leave)]
        assert [(each.learner, each.lost) for each in left] == [(1, True)] and list(run.learners) == [2]
        children.says("learner", 1, m.Returned("b"))
        yield
        children.says("shard", 0, DONE)

    lives(run, story, monkeypatch)
    assert run.error is None and run.outcome.returned == {1: "b"} and "lost" in kinds(run)


def test_a_lost_learner_is_replaced_under_a_new_id_where_the_user_wants_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Supervisor(spec_of(2, faults=Faults(replace=True)))

    def story(children: Children) -> Story:
        with pytest.warns(LostWarning, match="another takes its place"):
            children.ends("learner", 0)
        yield
        assert sorted(run.learners) == [2, 3] and children.of("learner", 0).number == 3
        run.add_learners(1)
        yield
        assert sorted(run.learners) == [2, 3, 4] and children.of("learner", 2).number == 4
        for rank in range(3):
            children.says("learner", rank, m.Returned(rank))
        children.says("shard", 0, DONE)
        yield

    lives(run, story, monkeypatch)
    assert run.error is None and run.outcome.returned == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("steps", [False, True])
def test_a_rank_is_given_up_when_process_after_process_dies_before_its_first_step(
    steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Supervisor(spec_of(2, faults=Faults(replace=True)))

    def story(children: Children) -> Story:
        for _ in range(MOST):
            if steps:
                Mailbox(children.spec_of("learner").desk).notes.push((0,) * 12 + (0.0,))
            with pytest.warns(LostWarning):
                children.ends("learner", 0)
            yield
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)
    assert ("given up" in kinds(run)) is not steps and len(run.learners) == 1 + steps


def test_a_stop_and_a_call_are_words_that_all_learners_see(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Supervisor(spec_of(1))

    def story(children: Children) -> Story:
        hub = children.spec_of("learner").hub.words
        run.announce(m.Call())
        run.announce(m.Renewed())
        assert (hub[STOP], hub[GENERATION], hub[CALLS]) == (0, 1, 1)
        run.stop(interrupted=True)
        yield
        assert hub[STOP] == 1 and run.outcome.interrupted
        children.says("learner", 0, m.Returned(None))
        children.says("shard", 0, DONE)
        yield

    lives(run, story, monkeypatch)


def test_learners_that_do_not_finish_their_step_after_a_stop_are_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "GRACE", -1.0)
    run = Supervisor(spec_of(2))

    def story(children: Children) -> Story:
        run.stop()
        while len(children.killed) < 2:
            yield
        with pytest.warns(LostWarning):
            children.ends("learner", 0)
        children.ends("learner", 1)
        children.says("shard", 0, DONE)
        yield

    lives(run, story, monkeypatch)
    killed = [event.what for event in run.outcome.events if event.kind == "killed"]
    assert len(killed) == 2 and "did not finish its step" in killed[0]


def test_a_change_of_the_dial_goes_to_the_shards_under_the_next_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Supervisor(spec_of(1))

    def story(children: Children) -> Story:
        run.change(Sync.parse("async"))
        yield
        dials = [each for each in said_to(children.of("shard")) if isinstance(each, m.Dial)]
        assert [(each.number, str(each.sync), each.epoch) for each in dials] == [
            (0, "hardsync", 0),
            (1, "async", None),
        ]
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)
    assert kinds(run) == ["dial"]


# -- statistics ------------------------------------------------------------------------------------------------


def asking(run: Supervisor, got: list[m.Statistics], children: Children) -> Iterator[int]:
    """A caller asks on a thread of its own; the number of its question, when the leading shard has it."""
    thread = threading.Thread(target=lambda: got.append(run.ask_statistics()))
    thread.start()
    while not (
        asked := [each for each in said_to(children.of("shard")) if isinstance(each, m.AskStatistics)]
    ):
        yield -1
    yield asked[0].number
    thread.join()
    yield -1


def table(waiting: dict[int, int]) -> m.TableStatistics:
    return m.TableStatistics(
        7, 14, 0, 99, Staleness(gradients=0, mean=0.0, max=0, histogram={}), waiting, [], 0
    )


def test_whoever_asks_hears_of_every_process_and_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    run, got = Supervisor(spec_of(3)), list[m.Statistics]()

    def story(children: Children) -> Story:
        for number in asking(run, got, children):
            if number >= 0:
                said = m.Statistics(number, {0: table({0: 8, 2: -1})}, {0: 5, 1: 6}, {1: 0.5})
                children.says("shard", 0, (0, said))
            yield
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)
    rows = [(each.role, each.rank, each.state, each.steps, each.loss) for each in got[0].processes]
    assert rows == [
        ("shard", 0, "running", 0, None),
        ("learner", 0, "waits for version 8", 5, None),
        ("learner", 1, "computing", 6, 0.5),
        ("learner", 2, "has no data", 0, None),
    ]


def test_a_leading_shard_that_does_not_answer_keeps_no_caller_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "SILENCE", -1.0)
    run, got = Supervisor(spec_of(1)), list[m.Statistics]()

    def story(children: Children) -> Story:
        for _ in asking(run, got, children):
            yield
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)
    assert [(each.role, each.state) for each in got[0].processes] == [
        ("shard", "running"),
        ("learner", "computing"),
    ]


# -- several machines ------------------------------------------------------------------------------------------


class Elsewhere(Host):
    """Another machine: notes what it is told."""

    def __init__(self, site: int) -> None:
        self.site, self.processes, self.told = site, list[Process](), list[tuple[Any, ...]]()

    def _note(self, name: str) -> Any:
        return lambda *given, **named: self.told.append((name, *given))

    def start_servers(self, generation: int, sites: Sites, learners: Any, *, again: bool) -> list[Process]:
        self.told.append(("start_servers", generation, sites))
        return []

    def start_learner(self, learner: int, rank: int) -> Process:
        channel: Any = Post()
        self.processes.append(Process("learner", learner, rank, 900 + rank, channel))
        return self.processes[-1]

    def vitals(self) -> Vitals:
        return Vitals({each.number: (1, False) for each in self.processes}, {}, {})

    def lose_node(self, node: int) -> None:
        pass

    def end_servers(self) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        noted = {
            "introduce",
            "forget",
            "initialise",
            "tell_shards",
            "reply",
            "announce",
            "kill",
            "end",
        }
        if name in noted | {"lose_site", "gain_site", "close"}:
            return self._note(name)
        return super().__getattribute__(name)


Elsewhere.__abstractmethods__ = frozenset()


class Cluster(Machines):
    """The caller's machine with the shard, and one for each learner."""

    sites = Sites((0,), (0, 1), grows=True)

    def __init__(self) -> None:
        self.other, self.told = Elsewhere(1), None

    def relay(self, parts: Any) -> Any:
        return parts

    def hosts(self, processes: Any, told: Any) -> list[Host]:
        self.told: Any = told
        return [self.other]

    def where(self, rank: int) -> int:
        return rank % 2

    def address(self, site: int) -> Any:
        return ("host", site)

    def hear(self, relay: Process, word: Any) -> None:
        pass


def test_the_leading_shards_machine_hears_last_of_what_all_shards_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, order = Cluster(), list[str]()
    run = Supervisor(spec_of(2), machines=cluster)

    def story(children: Children) -> Story:
        monkeypatch.setattr(run.host, "tell_shards", lambda message: order.append("leading"))
        monkeypatch.setattr(cluster.other, "_note", lambda name: lambda *given: order.append(name))
        run.tell_shards(m.CutDone())
        assert order == ["tell_shards", "leading"]
        run.fail(RunError("enough"))
        yield

    lives(run, story, monkeypatch)


def test_a_lost_machine_takes_its_learners_with_it_and_the_others_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster()
    run = Supervisor(spec_of(2), machines=cluster)

    def story(children: Children) -> Story:
        assert [run.sites[learner] for learner in (1, 2)] == [0, 1]
        with pytest.warns(
            LostWarning, match="learner 1 lost: its process .* ended with its machine: no answer"
        ):
            cluster.told.lost(1, "no answer")
        yield
        assert list(run.learners) == [1] and ("close",) in cluster.other.told
        assert cluster.other.processes[0].state == "lost" and run.host.sites.live == (0,)
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)
    assert kinds(run)[:2] == ["machine lost", "lost"]


def test_a_machine_that_joins_hears_all_that_machines_know(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, new = Cluster(), Elsewhere(2)
    run = Supervisor(spec_of(2), machines=cluster)

    def story(children: Children) -> Story:
        run.announce(m.Call())
        cluster.told.joined(new, "rack 3")
        yield
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)
    names = [each[0] for each in new.told]
    assert names[:3] == ["start_servers", "announce", "announce"] and new.told[2] == ("announce", CALLS, 1)
    assert [each[1:] for each in new.told if each[0] == "introduce"] == [(1, 0, 0), (2, 1, 1)]
    assert isinstance(next(each for each in new.told if each[0] == "tell_shards")[1], m.Dial)
    assert ("gain_site", 2) in cluster.other.told and run.host.sites.live == (0, 1, 2)


class Disk:
    """In place of a writer: what it writes is there when the test says so."""

    made: list[Disk]

    def __init__(self, folder: Path, report: Any) -> None:
        self.report, self.closed = report, False
        Disk.made.append(self)

    def write(self, number: int, name: str, *given: Any) -> None:
        self.saved = m.Saved(number, name, None)

    def close(self) -> None:
        self.closed = True


def test_what_was_written_for_shards_that_are_gone_belongs_to_no_checkpoint_of_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another with the same number may have begun."""
    run, heard = Supervisor(spec_of(storage=Storage(folder=str(tmp_path)))), list[Any]()
    Disk.made = []
    monkeypatch.setattr(supervisor, "Writer", Disk)

    def story(children: Children) -> Story:
        monkeypatch.setattr(run.coordinator, "from_shard", heard.append)
        children.says("shard", 0, (0, m.Save(4, "old", {}, {})))
        run.renew_shards()
        children.says("shard", 0, (0, m.Save(4, "new", {}, {})))
        for disk in Disk.made:
            disk.report(disk.saved)
        yield
        yield
        assert [disk.closed for disk in Disk.made] == [True, False]
        run.fail(RunError("enough"))

    lives(run, story, monkeypatch)
    assert [saved.name for saved in heard] == ["new"] and Disk.made[1].closed

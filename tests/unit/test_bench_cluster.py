"""The cluster benchmark: its arithmetic, its words, what it counts. No time is asserted; namespaces are in test_link.py."""

from typing import Any

import pytest

pytest.importorskip("ray")

from benchmarks import link
from benchmarks.bench_cluster import CONTENDERS, arguments, lines, link_share, measure, show
from benchmarks.cluster_driver import answer, together
from benchmarks.cluster_learner import LEAST_STEPS, WARM_UP_STEPS, Pace, pace
from benchmarks.cluster_nodes import shares
from benchmarks.peers import ray_server
from benchmarks.peers.team import PeerError


def row(mbit: float | None = 1000.0, **rates: list[float]) -> dict[str, Any]:
    paces = {name: [vars(Pace(rate, 50e6, 100e6)) for rate in values] for name, values in rates.items()}
    return {
        "dims": [784, 10],
        "batch_size": 4,
        "mbit": mbit,
        "workers": 2,
        "paces": paces,
        "failed": {},
        "predicted": {},
    }


def test_ratios_are_those_of_medians() -> None:
    ours, ddp, actors = lines(row(hardsync=[10.0, 30.0, 20.0], ddp=[40.0], actors=[4.0, 5.0]))
    assert "20.0" in ours and "10.0..30.0" in ours and "0.50x ddp, 4.44x actors" in ours
    assert "80 %" in ours  # 100 MB of 125 a second, in the busier direction
    assert "x" not in ddp and "x" not in actors


def test_a_prediction_is_shown_with_its_error() -> None:
    (told,) = lines({**row(hardsync=[20.0]), "predicted": {"hardsync": 25.0}})
    assert "predicted 25.0 (+25 %)" in told


def test_an_unlimited_link_has_no_share() -> None:
    assert link_share([{"sent": 1.0, "received": 2.0}], None) is None


def test_whoever_fails_is_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str) -> Pace:
        if name == "ddp":
            raise PeerError("Traceback\nOSError: no route")
        return Pace(1.0, 0.0, 0.0)

    paces, failed = measure(run, ["async", "ddp"], 2)
    assert len(paces["async"]) == 2 and set(failed) == {"ddp"}
    show(
        {
            **row(None),
            "paces": {name: [vars(each) for each in found] for name, found in paces.items()},
            "failed": failed,
        }
    )
    words = capsys.readouterr().out
    assert "ddp failed: OSError: no route" in words and "unlimited" in words


def test_in_lockstep_all_take_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {True: 0, False: 0}

    def step(free: bool) -> float:
        counts[free] += 1
        return 1e9

    for free in counts:
        found = pace(lambda free=free: step(free), 0.0, lambda value: 0.5, free=free)  # type: ignore[misc]
        assert found.rate > 0 and found.computing > 1e9 * found.rate * 0.99
    assert counts == dict.fromkeys(counts, WARM_UP_STEPS + LEAST_STEPS)
    pace(lambda: step(False), 10.0, lambda value: 0.5, free=False)
    assert counts[False] == 2 * WARM_UP_STEPS + LEAST_STEPS + 20


def test_gradients_add_up_and_the_link_is_the_first_nodes() -> None:
    assert together([Pace(1.0, 2.0, 3.0), Pace(4.0, 5.0, 6.0)]) == Pace(5.0, 2.0, 3.0)
    assert together([Pace(1.0, 2.0, 3.0, 0.25), Pace(4.0, 5.0, 6.0, 0.75)]).computing == 0.5


def test_what_fails_in_the_driver_is_told() -> None:
    assert "TypeError" in answer('{"contender": "hardsync"}')["failed"]


def test_nodes_share_the_cores() -> None:
    assert shares([0, 1, 2, 5]) == [[0, 1], [2, 5]] and shares([3]) == [[3], [3]]
    assert shares([0, 1], 3) == [[0, 1], [0], [1]]  # the first is the shards'


def test_traffic_is_counted_by_interface() -> None:
    before = link.traffic("lo")
    assert link.traffic("none such") == (0, 0) and min(link.traffic("lo")) >= min(before)


def test_words_on_the_command_line() -> None:
    assert arguments([]).contenders.split(",") == list(CONTENDERS)
    assert set(ray_server.WAYS) < set(CONTENDERS)
    assert arguments(["--quick"]).repeats == 1
    with pytest.raises(SystemExit):
        arguments(["--contenders", "hardsink"])


def test_the_peers_server_applies_the_mean() -> None:
    server, worker = ray_server.Server((3, 2)), ray_server.Worker((3, 2), 4, 0)
    gradient = worker.gradient(server.weights())
    before = [each.copy() for each in server.weights()]
    after = server.apply(gradient, [3 * each for each in gradient])
    for old, new, part in zip(before, after, gradient, strict=True):
        assert new == pytest.approx(old - 0.01 * 2 * part, rel=1e-5, abs=1e-7)

"""The overlap benchmark: its arithmetic, its words on the command line, and a quick run without a link. No time is asserted."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks import link
from benchmarks.bench_overlap import Row, arguments, balanced_rate, keep, lines, method_names, show, steps_in
from benchmarks.overlap_learner import METHODS, WORKLOADS, Place, Times, environment

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def row(**wall: list[float]) -> dict[str, Any]:
    made = Row("alexnet", 1_000_000, 64, 100.0, 10)
    for method, values in wall.items():
        for value in values:
            made.add(method.replace("_", ":"), [Times(value, 0.1), Times(value / 2, 0.3)])
    return vars(made)


def test_overlap_is_compute_over_compute_and_visible_communication() -> None:
    found = {
        line.method: line
        for line in lines(
            row(
                none=[0.1, 0.2, 0.3],
                communication=[0.2],
                ddp=[0.5],
                ddp_1=[0.4],
                delayed_1=[0.25],
                blocking=[0.4],
            )
        )
    }
    assert found["delayed:1"].overlap == pytest.approx(0.8)
    assert found["delayed:1"].over_ddp == pytest.approx(0.4 / 0.25)  # the better DDP counts
    assert found["blocking"].over_ddp == pytest.approx(1.0)
    assert found["none"].ms == pytest.approx(200) and found["none"].spread == pytest.approx((100, 300))
    assert found["none"].core_ms == pytest.approx(200)
    assert found["none"].overlap is None
    assert found["communication"].overlap is None and found["communication"].over_ddp is None


def test_methods_faster_than_none_hide_everything_and_no_more() -> None:
    (_, other) = lines(row(none=[0.2], delayed_1=[0.19]))
    assert other.overlap == 1.0 and other.over_ddp is None


def test_a_row_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show(row(none=[0.2], ddp=[0.4]))
    words = capsys.readouterr().out
    assert "alexnet, 1.00 M parameters, μ 64, 100 Mbit/s" in words
    assert "50.0 %" in words


def test_a_balanced_link_takes_as_long_as_the_computation() -> None:
    # 6.25 M parameters are 200 Mbit; in 0.2 s that is 1000 Mbit/s, and headers
    assert balanced_rate(6_250_000, 0.2) == 1100
    assert balanced_rate(6_250_000, 0.25) == 850
    assert steps_in(3.0, 0.2) == 15 and steps_in(0.0, 0.2) == 5


def test_rows_are_kept_behind_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.json"
    for number in range(2):
        keep(file, {"commit": str(number)}, {"model": "alexnet"})
    assert [row["machine"]["commit"] for row in json.loads(file.read_text())] == ["0", "1"]


def test_methods_on_the_command_line() -> None:
    assert method_names("none,layerwise,apply=arrival,ddp:1") == ["none", "layerwise,apply=arrival", "ddp:1"]
    assert arguments([]).methods == list(METHODS)
    with pytest.raises(argparse.ArgumentTypeError, match="no method 'delayd:1'; there are: none "):
        method_names("none,delayd:1")
    with pytest.raises(SystemExit):
        arguments(["--models", "alexnat"])
    assert set(arguments(["--quick"]).models.split(",")) <= set(WORKLOADS)


def test_learners_are_told_as_by_torchrun() -> None:
    place = Place(namespace="a", address="10.0.0.1", port=7, interface="link0", core=1)
    told = environment(1, place)
    assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_ADDR"], told["MASTER_PORT"]) == (
        "1",
        "2",
        "10.0.0.1",
        "7",
    )
    assert told["GLOO_SOCKET_IFNAME"] == "link0"


def test_the_two_models_are_of_the_two_kinds() -> None:
    alex, google = WORKLOADS["alexnet"], WORKLOADS["googlenet"]
    assert alex.parameters > 4 * google.parameters
    assert len(list(google.model().parameters())) > 5 * len(list(alex.model().parameters()))
    images, labels = alex.batch(seed=0)
    assert len(images) == len(labels) == alex.batch_size


def test_namespaces_of_dead_processes_are_found(tmp_path: Path) -> None:
    (tmp_path / "17").mkdir()
    known = [
        "syncline-link-17-0",
        "syncline-link-18-1",
        "syncline-link-18-0",
        "other-18-0",
        "syncline-link-18-7",
    ]
    assert link.left(known, tmp_path) == ["syncline-link-18-0", "syncline-link-18-1"]


def test_a_link_is_shaped() -> None:
    words = " ".join(link.shaping(1.5))
    assert "tbf rate 1500kbit" in words
    with pytest.raises(link.LinkError, match="above 0 Mbit/s, got 0"):
        link.Link(0)
    assert "burst 1000kb latency 50ms" in " ".join(link.shaping(1000, 1000, 50))


def test_what_a_link_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(link.LinkError, match="needs root: run it as root"), link.Link(10):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(link.LinkError, match="ip and tc not found: install iproute2"), link.Link(10):
        pass


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(link.LinkError, match="'false now' failed: 1"):
        link.command("false", "now")


def possible() -> bool:
    """Root, iproute2, and a kernel that lets this process make namespaces."""
    try:
        with link.Link(10):
            return True
    except link.LinkError:
        return False


def test_a_link_is_gone_afterwards() -> None:
    if not possible():
        pytest.skip("making network namespaces needs root and iproute2")
    seen: list[set[str]] = []

    def fail(made: link.Link) -> None:
        with made:
            seen.append(set(made.namespaces) & set(link.names()))
            raise ValueError("as any")

    made = link.Link(10)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="as any"):
        fail(made)
    assert seen == [set(made.namespaces)] and not seen[0] & set(link.names())
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("mbit", "shaped"), [(10.0, True), (None, False)])
def test_only_a_link_with_a_rate_is_shaped(mbit: float | None, shaped: bool) -> None:
    if not possible():
        pytest.skip("making network namespaces needs root and iproute2")
    with link.Link(mbit) as made:
        for namespace in made.namespaces:
            command = ["tc", "-n", namespace, "qdisc", "show", "dev", link.INTERFACE]
            assert ("tbf" in subprocess.run(command, capture_output=True, text=True).stdout) == shaped


def test_more_than_two_namespaces_are_joined_by_a_switch() -> None:
    if not possible():
        pytest.skip("making network namespaces needs root and iproute2")

    def inside(namespace: str, act: Callable[[], T]) -> T:
        """In a thread of its own, which stays there."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(link.enter, namespace).result()
            return pool.submit(act).result()

    with link.Link(50, sides=3) as made:
        first, _, third = made.namespaces
        with inside(third, lambda: socket.create_server((link.ADDRESSES[2], 0))) as server:
            inside(first, lambda: socket.create_connection(server.getsockname(), timeout=30)).close()
        places = (*made.namespaces, *made._switch)
        shown = [
            subprocess.run(["tc", "-n", each, "qdisc"], capture_output=True, text=True) for each in places
        ]
        assert [each.stdout.count("tbf") for each in shown] == [1, 1, 1, 3]
    assert not set(places) & set(link.names())


@pytest.mark.long
def test_a_quick_run_without_a_link(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.bench_overlap", "--quick", "--json", str(file)]
    command += ["--methods", "none,layerwise,delayed:1"]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [row["model"] for row in rows] == ["alexnet-small"]
    for found in rows:
        assert set(found["wall"]) == {"none", "layerwise", "delayed:1"}
        assert all(time > 0 for times in found["wall"].values() for time in times)

"""Figures about models on several machines: that they can be made, and what must come out of any such costs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import bench_parallel
from reproductions import measured
from reproductions.cots import fig6
from reproductions.distbelief import fig3
from reproductions.singa import fig7, fig9
from reproductions.splits import Split


def by_name(rows: list[Split]) -> dict[tuple[str, int], Split]:
    return {(row.what, row.group): row for row in rows}


def test_hybrid_is_at_least_as_fast_as_each_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = by_name(fig7.rows([1, 4], 0.1))
    assert all(found[name, 1].total == pytest.approx(fig7.ONE_NODE) for name in fig7.WAYS)
    assert found["hybrid", 4].total <= min(found["model-parallel", 4].total, found["data-parallel", 4].total)
    assert found["model-parallel", 4].parameters == 0 < found["model-parallel", 4].features
    monkeypatch.setattr(
        sys, "argv", ["fig9", "--workers", "4", "--width", "0.1", "--csv", str(tmp_path / "rows.csv")]
    )
    fig9.main()
    assert "images/s by group size: 1:" in capsys.readouterr().out
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0].startswith('# {"cpu"') and "commit" in lines[0]
    assert lines[1].split(",")[:3] == ["what", "workers", "group"] and len(lines) == 5


def test_servers_that_all_send_everything_to_end_what_data_parallelism_gains() -> None:
    served = [row for row in fig7.rows([4, 8, 32], 1.0) if "servers" in row.what]
    few, more, many = (row.total for row in served)
    assert more < few and many > more


def test_dense_nets_gain_little_and_large_local_ones_more() -> None:
    speed = {}
    for name in ("speech", "80m", "1.7b"):
        one, sixteen = fig3.rows(name, [1, 16])
        speed[name] = one.total / sixteen.total
    assert speed["80m"] < speed["1.7b"] and speed["speech"] < 3 < speed["1.7b"]


def test_an_update_of_the_large_net_is_cut_over_the_image() -> None:
    one, four = fig6.rows("1.8b", [1, 4], 1.0)
    assert 3 < one.total / four.total <= 4.1


@pytest.mark.long
def test_every_method_of_the_benchmark_steps(capsys: pytest.CaptureFixture[str]) -> None:
    row = bench_parallel.measured("small", 8, "loopback", ["ddp", "ours", "group"], 1, 1)
    assert set(row.seconds) == {"ddp", "ours", "group"} and min(row.seconds["ours"]) > 0
    assert row.predicted > 0
    bench_parallel.show(row)
    assert "of what ours takes" in capsys.readouterr().out


@pytest.mark.long
def test_a_measured_point_stands_beside_what_the_plan_says() -> None:
    found = measured.point("fig7", ("hybrid", "small", 8, None), 2, 1, 1)
    assert found.processes == 2 and min(found.predicted, found.measured) > 0

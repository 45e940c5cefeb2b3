"""Means over seeds, the best, the frontier, Rudra's groups."""

from __future__ import annotations

import math

import pytest

from syncline.studies.grid import Point, asked
from syncline.studies.summary import baseline, best, fastest, frontier, groups, places, wanted
from tests.unit.studies.studies import row, whole


def test_places_are_means_over_seeds() -> None:
    found = places(whole(seeds=(0, 1, 2)), "test_error")
    assert len(found) == 27 and all(each.runs == 3 for each in found)
    first = found[0]
    assert first.value == pytest.approx(0.1014) and (first.low, first.high) == (0.1004, 0.1024)
    assert first.name == "(0, 4, 1)"
    assert {each.name for each in found} >= {"(29, 128, 30)", "(0.8, 16, 4)"}


def test_what_failed_or_diverged_has_no_value() -> None:
    rows = whole()
    rows[0] = asked(rows[0].point, error="no luck")
    rows[1] = row(rows[1].point, test_error=math.nan)
    found = places(rows, "test_error")
    assert len(found) == 26
    assert [each.value for each in found].count(None) == 1
    assert all(each.value is not None for each in best(found, 100))


def test_the_column_that_there_is() -> None:
    rows = whole()
    assert wanted(rows) == "test_error"
    assert wanted([row(each.point, test_error=None) for each in rows]) == "test_loss"
    assert wanted([row(each.point, test_error=None, test_loss=None) for each in rows]) == "loss"
    timed = [row(each.point, test_error=None, test_loss=None, loss=None) for each in rows]
    assert wanted(timed) is None and len(places(timed, None)) == 27


def test_the_best_and_the_fastest() -> None:
    found = places(whole(), "test_error")
    assert [each.name for each in best(found, 2)] == ["(0, 4, 1)", "(0, 4, 1)"]
    assert fastest(found, 1)[0].learners == 30
    kept = frontier(found)
    for one in kept:
        assert one.value is not None
        assert not any(
            each.seconds <= one.seconds and (each.value or 1) < one.value and each is not one
            for each in found
        )
    assert kept[0].seconds == min(each.seconds for each in found)
    assert kept[-1].value == min(each.value for each in found if each.value is not None)


def test_groups_are_those_of_rudra_s_table_2() -> None:
    table = {
        128: [(4, 30), (8, 18), (16, 10), (32, 4), (64, 2), (128, 1)],
        256: [(8, 30), (16, 18), (32, 10), (64, 4), (128, 2)],
        512: [(16, 30), (32, 18), (64, 10), (128, 4)],
        1024: [(32, 30), (64, 18), (128, 10)],
    }
    rows = [
        row(Point(sync="softsync:1", learners=learners, batch_size=size))
        for members in table.values()
        for size, learners in members
    ]
    found = groups(places(rows, "test_error"))
    assert {group.size: [(e.batch_size, e.learners) for e in group.places] for group in found} == table
    assert [group.mean for group in found] == sorted(group.mean or 0 for group in found)
    assert found[0].fastest.learners == 30 and 120 < found[0].middle < 160


def test_the_baseline_is_one_learner_with_the_largest_batch() -> None:
    found = baseline(places(whole(), "test_error"))
    assert found is not None and (found.sync, found.name) == ("hardsync", "(0, 128, 1)")
    assert baseline(places(whole(learners=(4,)), "test_error")) is None

"""report.html and its plots: well-formed, complete by itself, with the right numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from syncline.report.html_page import page
from syncline.report.run_record import RunRecord
from tests.unit.report.lines_of_a_run import end, event, start, whole

SVG = "{http://www.w3.org/2000/svg}"


def tree_of(lines: list[dict[str, Any]]) -> ElementTree.Element:
    record = RunRecord(Path("runs/<a & b>"))
    for line in lines:
        record.feed(line)
    text = page(record)
    assert not re.search(r"<script|<link|src=|url\(|@import", text)
    assert set(re.findall(r"https?://[^'\"]+", text)) == {"http://www.w3.org/2000/svg"}
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def words(tree: ElementTree.Element) -> str:
    return " ".join("".join(tree.itertext()).split())


def test_the_numbers_are_there() -> None:
    tree = tree_of(whole())
    numbers = {
        cell[1].text: cell[0].text for cell in tree.iter("div") if len(cell) == 2 and cell[0].tag == "b"
    }
    assert numbers["test accuracy"] == "81.25 %"
    assert numbers["test loss"] == "0.25"
    assert numbers["updates"] == "40" and numbers["gradients folded"] == "80"
    assert numbers["mean staleness"] == "0.75" and numbers["largest staleness"] == "2"
    assert numbers["examples/s"] == "321" and numbers["epochs"] == "4"


def test_the_plots() -> None:
    tree = tree_of(whole())
    titles = [plot.find(f"{SVG}title").text for plot in tree.iter(f"{SVG}svg")]  # type: ignore[union-attr]
    assert titles == [
        "Loss over epochs",
        "Loss over time",
        "Test accuracy over epochs",
        "Test accuracy over time",
        "Staleness of gradients",
        "Rates of learners",
    ]
    bars = [rect.find(f"{SVG}title").text for rect in tree.iter(f"{SVG}rect") if len(rect)]  # type: ignore[union-attr]
    assert bars == ["σ = 0: 10 gradients", "σ = 1: 25 gradients", "σ = 2: 5 gradients"]


def test_faults_are_a_table_and_marks() -> None:
    tree = tree_of(whole())
    marks = [line for line in tree.iter(f"{SVG}line") if line.get("class") == "fault"]
    assert len(marks) == 3, "on each plot over time"
    assert "learner 1 lost: its process (pid 7) ended with SIGKILL" in words(tree)


@pytest.mark.parametrize(
    "lines",
    [
        [start()],
        [start(), end("failed", error="<b>&")],
        [start(run={}), event("lost", "a\nb <c>\x00")],
        [start(), {**whole()[2], "loss": None, "metrics": {"loss": None, "accuracy": None}}],
    ],
    ids=["started", "failed", "strange", "not finite"],
)
def test_pages_of_runs_that_went_wrong(lines: list[dict[str, Any]]) -> None:
    record = RunRecord(Path("runs/x"))
    for line in lines:
        record.feed(line)
    ElementTree.fromstring(page(record).removeprefix("<!DOCTYPE html>\n"))

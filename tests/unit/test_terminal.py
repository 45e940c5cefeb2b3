"""Hostile texts in files and in user code: no command, page or picture obeys or swallows them."""

from __future__ import annotations

import ast
import io
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn
from typer.testing import CliRunner

from syncline.cli.app import app
from syncline.cli.study_display import Progress
from syncline.cli.study_display import panel as study_panel
from syncline.jobs import dumps
from syncline.report.html_page import page
from syncline.report.progress import ProgressDisplay
from syncline.report.run_panel import comparison, panel
from syncline.report.run_record import RunRecord, read_run
from syncline.studies.grid import Point
from syncline.studies.store import head, line_of
from syncline.terminal import HIDDEN, Terminal, visible
from tests.unit.report.lines_of_a_run import OPTIONS, end, epoch, event, start, statistics
from tests.unit.studies.studies import row

SOURCE = Path(__file__).resolve().parents[2] / "src" / "syncline"
PARTS = [
    "[/bold]",
    "[red]",
    "[link=file:///etc/passwd]",
    "[",
    "\\[",
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x9b2J",
    "\x00",
    "\r",
]
PARTS += [
    "\n",
    "\t",
    "\x7f",
    "\u202e",
    "\u2028",
    "\ud800",
    "\ufffe",
    ":warning:",
    "<script>",
    "&lt;",
    "'",
    '"',
    "{x}",
    "λ",
    "a b",
]
NAMES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("".join)
FEW = settings(max_examples=25, deadline=None)


def harmless(text: str) -> bool:
    return not re.search(HIDDEN, text.replace("\n", ""))


def lines_of(name: str) -> list[dict[str, Any]]:
    """Return the lines of a run in which every text is this name."""
    options = {
        **OPTIONS,
        **dict.fromkeys(("sync", "model", "function", "engine", "topology", "machine", name), name),
    }
    states = (name, f"waits for version {name}")
    told = {**epoch(0, accuracy=0.5), "metrics": {name: 0.5, f"{name} accuracy": 0.5}, "notes": {name: 1.0}}
    return [
        start(run=options, host=name),
        statistics(0.5, version=2, states=states),
        told,
        {**told, "epoch": 1, "metrics": {name: 0.25}},
        *(event(kind, f"{name}\n{name}", rank=1) for kind in ("lost", "warning", "checkpoint", name)),
        {**end("failed", error=name), "learners": statistics(0.5, version=2, states=states)["learners"]},
    ]


@contextmanager
def written(name: str) -> Iterator[Path]:
    """Write a run into a folder of this name."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / re.sub("[\0/\ud800\ufffe]", "", f"x{name}")
        folder.mkdir()
        lines = "".join(json.dumps(line) + "\n" for line in lines_of(name))
        (folder / "events.jsonl").write_text(lines)
        yield folder


def printed(*arguments: str | Path, codes: tuple[int, ...] = (0,)) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "100"})
    assert result.exit_code in codes, (result.output, result.exception)
    assert harmless(result.output), result.output
    return result.output


@given(NAMES)
def test_visible_writes_every_hidden_character_out(name: str) -> None:
    shown = visible(name)
    assert harmless(shown) and "\n" not in shown and visible(shown) == shown
    assert visible(name, lines=True).count("\n") == name.count("\n")
    shown.encode()
    assert visible("λ × – é 日本 👨‍👩‍👧") == "λ × – é 日本 👨‍👩‍👧"


@given(NAMES)
@FEW
def test_a_terminal_prints_texts_as_they_are(name: str) -> None:
    out = io.StringIO()
    terminal = Terminal(file=out, width=400, force_terminal=True, color_system=None)
    table = Table(name, title=name)
    table.add_row(name)
    for each in (name, Text(name), table):
        terminal.print(each)
    assert harmless(out.getvalue())
    for line in filter(str.strip, name.split("\n")):
        assert out.getvalue().count(visible(line).strip()) >= 3


@given(NAMES)
@FEW
def test_runs(name: str) -> None:
    with written(name) as folder:
        assert visible(name).strip() in " ".join(printed("show", folder).split("\n")) or len(name) > 30
        assert {visible(f"test {name}"), visible(f"test {name} accuracy")} == set(read_run(folder).metrics)
        printed("compare", folder, folder, "--plot", folder / "plot.svg")
        ElementTree.parse(folder / "plot.svg")
        text = page(read_run(folder))
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert harmless(text) and "<script" not in text


@given(NAMES)
@FEW
def test_the_live_display_and_plain_lines(name: str) -> None:
    record = RunRecord(Path(name.replace("\0", "")))
    for line in lines_of(name)[:-1]:
        record.feed(line)
    out = io.StringIO()
    terminal = Terminal(file=out, width=100, height=60, force_terminal=True, color_system=None)
    with Live(console=terminal, auto_refresh=False, get_renderable=lambda: panel(record, note=name)) as live:
        live.refresh()
    terminal.print(comparison([record]))
    assert harmless(re.sub(r"\x1b\[\??[0-9]*[A-Za-z]|\r", "", out.getvalue())), "but for the cursor's way"
    record = RunRecord(Path("run"))
    lines = Terminal(file=(plain := io.StringIO()), width=100)
    record.feed(lines_of(name)[0])
    with ProgressDisplay(record, name, console=lines).shown(live=False):
        for line in lines_of(name)[1:]:
            record.feed(line)
    assert harmless(plain.getvalue())
    notebook = Terminal(record=True, width=100, file=io.StringIO(), force_jupyter=False)
    notebook.print(panel(record, note=name))
    html = notebook.export_html(inline_styles=True)
    assert harmless(html) and "<script" not in html
    assert sum(line.startswith("epoch ") for line in plain.getvalue().splitlines()) == 2


@given(NAMES)
@FEW
def test_jobs_and_options(name: str) -> None:
    job: dict[str, Any] = {
        "model": {"name": "mlp", "sizes": [64, 10]},
        "data": "digits",
        "loss": "mse",
        "optimizer": "sgd",
    }
    text = name.replace("\ud800", "").replace("\ufffe", "")
    with tempfile.TemporaryDirectory() as root:
        file = Path(root) / "job.toml"
        for key, value in (
            (text, text),
            ("model", text),
            ("sync", text),
            ("model", {"name": "mlp", text: 1}),
        ):
            file.write_text(dumps({**job, key: value}))
            for command in ("train", "simulate", "tradeoff", "plan", "show"):
                printed(command, file, codes=(1, 2))
        printed("train", "--set", f"{text}={text}", "--sync", text, codes=(2,))
        printed("show", re.sub("[\0]", "", text), codes=(2,))


class Named(nn.Sequential):
    """A net with a layer and a description of this name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name.replace(".", ""), nn.Linear(64, 10))
        self.name = name

    def extra_repr(self) -> str:
        return self.name


@given(NAMES)
@settings(max_examples=5, deadline=None)
def test_models(name: str) -> None:
    text = name.replace("\ud800", "").replace("\ufffe", "")
    model = {"name": f"{Named.__module__}:made", "text": text}
    job = {"model": model, "data": "digits", "loss": "cross_entropy", "optimizer": {"name": "sgd", "lr": 0.1}}
    with tempfile.TemporaryDirectory() as root:
        file = Path(root) / "job.toml"
        file.write_text(dumps(job))
        assert "Linear" in printed("show", file)
        printed("plan", file)


def made(text: str) -> nn.Module:
    return nn.Sequential(nn.Flatten(), Named(text))


@given(NAMES)
@FEW
def test_studies(name: str) -> None:
    point = Point(sync="async", learners=2, batch_size=4, seed=0)
    failed = row(Point(sync="async", learners=4, batch_size=4, seed=0), error=f"x{name}")
    with tempfile.TemporaryDirectory() as root:
        rows = [
            line_of(row(point)),
            line_of(failed),
            line_of(row(point)).replace("async", f'"{name}"'.replace("\n", "")),
        ]
        (Path(root) / "tradeoff.csv").write_text(head() + "".join(rows), encoding="utf-8", errors="replace")
        (Path(root) / "job.toml").write_text(dumps({"model": {"name": name.replace("\ud800", "")}}))
        printed("tradeoff", "--plot", root, codes=(0, 2))
        for file in Path(root).glob("tradeoff.svg"):
            ElementTree.parse(file)
    progress = Progress([point])
    progress.started(point, 0.0)
    progress.moved(point, 0.5, name)
    terminal = Terminal(file=(out := io.StringIO()), width=100)
    terminal.print(study_panel(progress, 1.0))
    assert harmless(out.getvalue())


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_every_console_is_a_terminal(file: Path) -> None:
    """Allow no other rich console, and no `print` without `visible` on the command line."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "Console", f"line {node.lineno}: make a syncline.terminal.Terminal"
            if node.func.id == "print" and file.parent.name in ("cli", "studies"):
                words = ast.unparse(node.args[0])
                assert words.startswith("visible(") or words in ("line", "f'syncline {VERSION}'"), words

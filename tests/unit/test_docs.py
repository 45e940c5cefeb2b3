"""The pages: links and paths lead somewhere, paragraphs stay short, examples of start/ and exact/ are what happens."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import syncline as sl
from syncline.dial import PRESETS
from syncline.report.clock_file import clock_lines

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "reproductions").rglob("*.md"))]
NAMING = ("src", "tests", "examples", "benchmarks", "reproductions")
SEMANTICS = DOCS / "exact" / "semantics.md"
KINDS = {"start", "howto", "exact", "measured"}
WIDTH, MOST = 110, 8

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)", prose(page), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    return slugs | set(re.findall(r'<a id="([^"]+)">', prose(page)))


def broken(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            yield link


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken(page))


def test_paths_of_pages_named_anywhere_exist() -> None:
    files = [
        file
        for folder in NAMING
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".md", ".toml")
    ]
    named = {
        (path, str(file.relative_to(ROOT)))
        for file in [*files, *PAGES, ROOT / "CHANGELOG.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
        for path in re.findall(r"\bdocs/[\w/]+\.md", file.read_text(encoding="utf-8"))
    }
    assert named
    assert not [each for each in sorted(named) if not (ROOT / each[0]).exists()]


def paragraphs(page: Path) -> Iterator[list[str]]:
    """Paragraphs and points of lists, by their lines; a row of a table is one, too."""
    lines: list[str] = []
    for line in prose(page).splitlines():
        if not line.strip() or re.match(r"\s*([-*]|\d+\.)\s|\||#", line):
            yield lines
            lines = []
        lines += [line] if line.strip() else []
    yield lines


@each_page
def test_no_paragraph_is_longer_than_eight_lines(page: Path) -> None:
    long = [
        f"{lines[0][:60]!r} … has {count} lines of {WIDTH}"
        for lines in paragraphs(page)
        if (count := sum(math.ceil(len(line) / WIDTH) for line in lines)) > MOST
    ]
    assert not long


def test_every_page_is_of_one_kind_and_in_the_index() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert {page.split("/")[0] for page in pages} == KINDS
    assert set(re.findall(r"\]\(([\w/]+\.md)\)", prose(DOCS / "README.md"))) == pages


def test_every_rule_that_is_cited_has_its_place() -> None:
    files = [file for folder in NAMING for file in (ROOT / folder).rglob("*.py")]
    cited = {
        int(n) for file in files for n in re.findall(r"\bM([1-9]\d?)\b", file.read_text(encoding="utf-8"))
    }
    assert cited <= set(range(1, 22))
    assert {f"m{number}" for number in range(1, 22)} <= anchors(SEMANTICS)


def test_every_preset_has_a_row_and_a_section() -> None:
    for preset in PRESETS:
        assert f"](#{preset.name})" in prose(SEMANTICS)
        assert preset.name in anchors(SEMANTICS)


TRACES = re.findall(r"^```\n([a-z]+\S*)\n((?:\d+ [\d: ]+\n)+)```", SEMANTICS.read_text(), re.MULTILINE)


def test_every_dial_has_a_trace() -> None:
    assert sorted(dial.split(":")[0] for dial, _ in TRACES) == sorted(preset.name for preset in PRESETS)


@pytest.mark.parametrize("dial, trace", TRACES)
def test_the_traces_of_the_dials_are_what_happens(dial: str, trace: str, tmp_path: Path) -> None:
    """Three simulated learners with speeds 1, 0.9 and 0.4."""
    sl.train(
        nn.Linear(4, 1),
        TensorDataset(torch.zeros(240, 4), torch.zeros(240, 1)),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        sync=dial,
        topology="servers:1",
        learners=3,
        batch_size=4,
        steps=8,
        run_dir=tmp_path / "run",
        clocks=True,
        engine=sl.Sim(sl.Cluster(speeds=(1.0, 0.9, 0.4))),
    )
    lines = trace.splitlines()
    assert list(islice(clock_lines(tmp_path / "run"), len(lines))) == lines


def test_the_first_run_runs() -> None:
    """The page's blocks one after the other, with every engine a simulated one and few epochs."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "start" / "first_run.md").read_text(), re.DOTALL)
    code = "\n".join(blocks).replace("epochs=5", 'epochs=1, engine="sim"').replace("range(3)", "range(1)")
    code = code.replace('sync="hardsync")', 'sync="hardsync", engine="sim")')
    assert code.count("engine=") == 3
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    assert names["result"].returned == list(range(30))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_files_that_the_tour_names_exist(name: str) -> None:
    named = re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./]+)`", (ROOT / name).read_text())
    assert named
    assert not [path for path in named if "NAME" not in path and not (ROOT / path).exists()]


def test_nothing_tells_to_install_from_an_index() -> None:
    files = [
        file
        for folder in (*NAMING, "docs", "tools")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".md", ".toml")
    ]
    pages = [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    command = re.compile(r"pip install [\"'\\]*syncline", re.IGNORECASE)
    found = [
        str(file.relative_to(ROOT))
        for file in [*files, *pages]
        if file != Path(__file__) and command.search(file.read_text(encoding="utf-8"))
    ]
    assert not found, "Syncline is on no package index: say what to do in a checkout"


def test_the_first_screen_of_the_readme_installs_and_runs(tmp_path: Path) -> None:
    """Run the first script unchanged, in a new process, from another folder."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, script = re.findall(r"\A(.*?)```python\n(.*?)```", text, re.DOTALL)[0]
    assert len(before.splitlines()) < 25
    assert all(command in before for command in ("make train", "make test", "pip install ."))
    (tmp_path / "first.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "first.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    metrics, staleness = done.stdout.splitlines()
    assert ast.literal_eval(metrics)["accuracy"] > 0.8 and "over 1820 gradients" in staleness


def test_the_changelog_stays_short() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60

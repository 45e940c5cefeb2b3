"""A study to its end, over made-up workers: what is asked of them, what is kept, how it ends. Real ones: integration."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from syncline.cli import tradeoff as tradeoff_module
from syncline.cli.app import app
from syncline.cli.error_output import FAILURE, INTERRUPTED
from syncline.cli.tradeoff import study
from syncline.jobs import Job
from syncline.studies.grid import Grid, Point
from syncline.studies.store import LOG, read_rows
from syncline.studies.worker_pool import News
from tests.unit.studies.studies import row

JOB = """
epochs = 2
model = {name = "mlp", sizes = [64, 10]}
data = "digits"
loss = "cross_entropy"
optimizer = {name = "sgd", lr = 0.1}
engine = {name = "sim", cluster = "p775"}
"""
GRID = Grid(syncs=("softsync:2", "async"), learners=(1, 3), batch_sizes=(32,))
LEFT = [("softsync:2", 3), ("async", 1), ("async", 3)]  # what can be


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)


class MadeUpPool:
    """Every run ends at once, the first one last; those in `fate` do otherwise."""

    fate: dict[tuple[str, int], str]
    asked: list[tuple[list[Point], int]]

    def __init__(self, prepare: Any, jobs: int, log: Path) -> None:
        self._jobs, self._log = jobs, log

    def __enter__(self) -> MadeUpPool:
        self._log.touch()
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def run(self, points: list[Point]) -> Iterator[list[News]]:
        self.asked.append((list(points), self._jobs))
        for point in (*points[1:], *points[:1]):
            yield [News("started", point), News("moved", point, 0.5)]
            match self.fate.get((point.sync, point.learners)):
                case "fails":
                    yield [News("ended", point, row(point, error="no luck"))]
                case "dies":
                    self._log.write_text("its last words")
                    yield [News("died", point, "its process ended with SIGKILL")]
                case "is interrupted" | "is interrupted twice" as how:
                    for _ in how.split()[1:]:
                        signal.raise_signal(signal.SIGINT)
                    yield [News("ended", point, row(point))]
                case _:
                    yield [News("ended", point, row(point))]


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpPool]:
    MadeUpPool.fate, MadeUpPool.asked = {}, []
    monkeypatch.setattr(tradeoff_module, "Pool", MadeUpPool)
    return MadeUpPool


def done(grid: Grid = GRID, at_once: int = 8, **options: Any) -> tuple[int, str]:
    """The exit code, and what was printed."""
    out = io.StringIO()
    options = {"timing": False, "fresh": False, **options}
    code = study(
        Job.load(Path("job.toml"), []), grid, Path("out"), at_once, Console(file=out, width=200), **options
    )
    return code, out.getvalue()


def rows() -> list[tuple[str, int]]:
    return [(each.sync, each.learners) for each in read_rows(Path("out"))]


def test_every_combination_that_can_be_is_run_once_and_the_same_again_runs_none(
    pool: type[MadeUpPool],
) -> None:
    code, said = done()
    assert code == 0 and rows() == LEFT
    ((points, workers),) = pool.asked
    assert [(each.sync, each.learners) for each in points] == LEFT and workers == 3, "no more than runs"
    assert "left out: softsync:2 with 1 learners" in said
    assert "out: mlp on digits, 2 epochs each, simulated on p775: 3 runs with 3 workers\n" in said
    assert said.index("1/3  async λ 1") < said.index("3/3  softsync:2 λ 3") < said.index("lowest test error")
    assert Path("out/tradeoff.svg").exists() and not Path("out", LOG).exists(), "nobody said anything"
    again, said = done()
    assert again == 0 and len(pool.asked) == 1 and "no run is left, 3 were done before" in said


def test_more_combinations_go_on_with_what_is_left_and_fresh_begins_anew(pool: type[MadeUpPool]) -> None:
    done(Grid(syncs=("async",), learners=(1,), batch_sizes=(32,)))
    _, said = done()
    assert [each.sync for each in pool.asked[1][0]] == ["softsync:2", "async"] and "1 was done before" in said
    done(fresh=True, at_once=2)
    assert len(pool.asked[2][0]) == 3 and pool.asked[2][1] == 2 and len(rows()) == 3


def test_a_run_that_fails_and_a_worker_that_dies_stop_no_other(pool: type[MadeUpPool]) -> None:
    pool.fate = {("softsync:2", 3): "fails", ("async", 1): "dies"}
    code, said = done()
    assert code == FAILURE and len(rows()) == 3
    errors = [each.error for each in read_rows(Path("out"))]
    assert errors == ["no luck", "its process ended with SIGKILL; out/log.txt may say why", ""]
    assert "failed: async λ 1" in said and Path("out", LOG).read_text() == "its last words"


def test_ctrl_c_keeps_the_row_that_came_with_it_and_begins_no_other(pool: type[MadeUpPool]) -> None:
    pool.fate = {("async", 3): "is interrupted"}
    before = signal.getsignal(signal.SIGINT)
    code, said = done()
    assert code == INTERRUPTED and rows() == LEFT[1:]
    assert "2 of 3 runs are done; the same command goes on with the rest" in said
    assert signal.getsignal(signal.SIGINT) is before and Path("out/tradeoff.svg").exists()
    pool.fate = {}
    assert done()[0] == 0 and rows() == LEFT and len(pool.asked[1][0]) == 1


def test_a_second_ctrl_c_does_not_wait(pool: type[MadeUpPool]) -> None:
    pool.fate = {("async", 3): "is interrupted twice"}
    with pytest.raises(KeyboardInterrupt):
        done()
    assert rows() == [("async", 1)] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "timing, words",
    [(False, "2 epochs each, simulated on p775"), (True, "2 epochs each, timed on p775")],
)
def test_sizes_only_is_another_study(timing: bool, words: str) -> None:
    assert words in done(timing=timing)[1]
    refused = tradeoff("job.toml", "--out", "out", "--epochs", "2", *([] if timing else ["--timing"]))
    assert refused.exit_code == 2 and "timing: " in refused.stderr and "--fresh" in refused.stderr


def tradeoff(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tradeoff", *arguments], env={"COLUMNS": "120"})


def test_the_command_asks_for_its_lists_in_a_folder_of_the_job_s_name(pool: type[MadeUpPool]) -> None:
    grid = (
        "--learners",
        "1,2",
        "--batch-size",
        "16",
        "--sync",
        "async,hardsync",
        "--seeds",
        "0,5",
        "--jobs",
        "2",
    )
    result = tradeoff("job.toml", *grid, "--reference-batch", "64")
    assert result.exit_code == 0, result.output
    ((points, workers),) = pool.asked
    assert len(points) == 8 and workers == 2 and {each.seed for each in points} == {0, 5}
    assert {each.sync for each in points} == {"async", "hardsync:reference_batch=64"}
    assert Path("runs/tradeoff-job/tradeoff.csv").exists()
    drawn = tradeoff("--plot", "runs/tradeoff-job")
    assert drawn.exit_code == 0 and "lowest test error" in drawn.output and len(pool.asked) == 1


def test_the_local_engine_has_one_run_at_a_time_unless_told(pool: type[MadeUpPool]) -> None:
    tradeoff("job.toml", "--engine", "local", "--learners", "1,2", "--batch-size", "16", "--out", "out")
    assert [jobs for _, jobs in pool.asked] == [1]
    assert (
        "seconds" in Path("out/tradeoff.svg").read_text()
        and "virtual" not in Path("out/tradeoff.svg").read_text()
    )


def test_of_streams_nobody_knows_how_long_they_are_not_even_of_chained_ones(
    pool: type[MadeUpPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("chained_streams.py").write_text(
        "from torch.utils.data import ChainDataset, IterableDataset\n"
        "class Stream(IterableDataset):\n    def __iter__(self): return iter(())\n"
        "def load(): return ChainDataset([Stream()])\n"
    )
    monkeypatch.syspath_prepend(".")
    Path("job.toml").write_text(JOB.replace('data = "digits"', 'data = "chained_streams:load"'))
    result = tradeoff("job.toml", "--learners", "2", "--batch-size", "32,4000", "--sync", "async")
    assert result.exit_code == 0, result.output
    assert [each.batch_size for each in pool.asked[0][0]] == [32, 4000]


BAD = {
    "no such dial": (["--sync", "hardsink"], "no preset is called 'hardsink', did you mean 'hardsync'?"),
    "n > λ": (["--sync", "softsync:9", "--learners", "2,4"], "n = 9 with 2 learners"),
    "no number": (["--learners", "a"], "--learners a: expected whole numbers"),
    "batch larger than data": (["--batch-size", "32,4000"], "--batch-size 4000: "),
    "no such cluster": (["--cluster", "p777"], "--cluster p777: unknown cluster 'p777'"),
    "epochs and steps": (["--epochs", "2", "--steps", "5"], "either epochs or steps"),
    "no such engine": (["--engine", "ray"], "--engine ray: expected sim or local"),
    "a cluster of the local engine": (
        ["--engine", "local", "--cluster", "p775"],
        "--cluster and --timing are",
    ),
    "no jobs": (["--jobs", "0"], "--jobs 0: expected a whole number of at least 1"),
    "no study": (["--plot", "nowhere"], "nowhere is no study"),
    "a dial that all-reduce does not have": (
        ["--set", "topology=allreduce", "--sync", "hardsync,async"],
        "--sync async: async over allreduce",
    ),
    "set beside the list": (["--set", "learners=3"], "--learners sets this in every run"),
    "a dial beside the list": (["--set", "sync.lead=1"], "--sync sets this in every run"),
    "a seed beside the list": (["--set", "seed=1"], "--seeds sets this in every run"),
    "real processes": (["--set", "engine=local"], "this command simulates"),
    "no such key": (["--set", "lerners=3"], "did you mean 'learners'"),
}


@pytest.mark.parametrize("arguments, words", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_before_anything_starts(arguments: list[str], words: str) -> None:
    result = tradeoff("job.toml", *arguments, "--out", "out")
    assert result.exit_code == 2, result.output
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not Path("out").exists()

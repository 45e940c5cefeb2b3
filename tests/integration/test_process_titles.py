"""Titles of real processes, read where `ps` and `nvidia-smi` read them: /proc/PID/cmdline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch.nn.functional as F
from torch import Tensor, nn

import syncline as sl
from syncline.engines.local import forkserver
from syncline.engines.process_titles import name_of_run
from syncline.testing import Nodes
from tests.integration.batch_runs import train as train_batch
from tests.integration.small_runs import launched, points, start

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(sl.__file__).parents[1])}


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


def own_title(session: sl.Session) -> str:
    return title(os.getpid())


def agent_and_own_title(session: sl.Session) -> tuple[str, str]:
    """Return the title of the learner's agent, the parent of its fork server, or without an agent the fork server's."""
    server = os.getppid()
    above = title(int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1]))
    return (above if above.startswith("syncline: agent") else title(server)), own_title(session)


def write_title(session: Any, folder: Path) -> None:
    (folder / f"{os.getpid()}.title").write_text(title(os.getpid()))


def write_title_and_lose(folder: Path, model: nn.Module, batch: Any) -> Tensor:
    write_title(None, folder)
    return F.cross_entropy(model(batch[0]), batch[1])


def written(folder: Path) -> list[str]:
    return sorted(path.read_text() for path in folder.glob("*.title"))


def titles(run: sl.Run) -> list[str]:
    """Titles of all processes, once every learner computes: a process has its title before that."""
    with run:
        while True:
            processes = run.statistics().processes
            learners = [each for each in processes if each.role == "learner"]
            if learners and all(each.steps for each in learners):
                return sorted(title(each.pid) for each in processes)


def of(run: str, *parts: str) -> list[str]:
    return sorted(f"syncline: {part} of {run}" for part in parts)


def test_learners_shards_and_the_evaluator(tmp_path: Path) -> None:
    run = start(points(64), learners=2, epochs=100_000, evaluate=points(8), run_dir=tmp_path / "int2")
    parts = ("learner 0", "learner 1", "shard 0", "shard 1", "evaluator")
    assert titles(run) == of("int2", *parts)


def test_a_run_without_a_folder_is_named_by_script_and_process() -> None:
    name = name_of_run(None)
    assert str(os.getpid()) in name
    assert launched(own_title, learners=1).returned == [f"syncline: learner 0 of {name}"]


def test_what_cannot_be_printed_in_a_folder_name_is_replaced(tmp_path: Path) -> None:
    result = launched(own_title, learners=1, run_dir=tmp_path / "a\nb\x1b[2J\udcff")
    assert result.returned == ["syncline: learner 0 of a?b?[2J?"]


def test_the_fork_server() -> None:
    launched(own_title, learners=1)
    pid = forkserver.pid()
    assert pid is not None and title(pid) == f"syncline: fork server of process {os.getpid()}"


def test_tree_nodes(tmp_path: Path) -> None:
    run = start(points(64), topology="tree:2", learners=2, epochs=100_000, run_dir=tmp_path / "t")
    found = titles(run)
    nodes = [each for each in found if re.fullmatch(r"syncline: tree node \d+ of t", each)]
    assert nodes and found == sorted([*nodes, *of("t", "learner 0", "learner 1", "shard 0", "shard 1")])


def test_learners_over_all_reduce(tmp_path: Path) -> None:
    found = launched(own_title, learners=2, topology="allreduce", run_dir=tmp_path / "ring").returned
    assert found == of("ring", "learner 0", "learner 1")


def test_seats_of_a_group(tmp_path: Path) -> None:
    launched(write_title, tmp_path, learners=1, group=2, run_dir=tmp_path / "cut")
    assert written(tmp_path) == of("cut", "seat 0 of learner 0", "seat 1 of learner 0")


def test_portion_workers(tmp_path: Path) -> None:
    train_batch(objective=partial(write_title_and_lose, tmp_path), run_dir=tmp_path / "whole")
    assert written(tmp_path) == of("whole", "portion worker 0", "portion worker 1")


def test_agents_of_a_cluster_have_titles_and_pass_the_run_on(tmp_path: Path) -> None:
    engine = Nodes(2, cores=2, apart=True)
    result = launched(agent_and_own_title, learners=2, engine=engine, run_dir=tmp_path / "far")
    assert result.returned == [
        (f"syncline: fork server of process {os.getpid()}", "syncline: learner 0 of far"),
        ("syncline: agent of far", "syncline: learner 1 of far"),
    ]


def test_ranks_of_torchrun_are_learners_for_the_time_of_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['syncline: learner 0 of ranks', 'syncline: learner 1 of ranks']",
        "script.py",
    ]


RANKS = """
import os
from pathlib import Path
import syncline as sl

def title():
    return Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode().replace("\\0", " ")

def learner(session):
    return title()

folder = Path(__file__).parent
returned = sl.launch(learner, topology="allreduce", run_dir=folder / "ranks").returned
if os.environ["RANK"] == "0":
    print(returned)
    print(Path(title().split()[-1]).name)
"""

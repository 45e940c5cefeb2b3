"""Test runs that begin while the module that starts them is being imported: no process of the run imports it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import syncline as sl
from tests.ready_python import ReadyPython, run_ready

HANG = 60.0  # seconds after which a run of a second has failed
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(sl.__file__).parents[1])}

COUNTED = """
import os
with open("bodies", "a") as file:  # a line for each process that runs this body
    file.write(f"{os.getpid()}\\n")
from functools import partial
import torch
from torch import nn
import syncline as sl
"""
LAUNCH = """
def learner(session):
    return os.getpid()
"""
TRAIN = """
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x)

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 2

class Rate(torch.optim.SGD):
    pass

def tested(model):
    return {"is": float(type(model).__name__ == "Small")}
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, code in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(code))


def ran(folder: Path, *arguments: str, code: int = 0) -> str:
    """Return what the script printed."""
    done = run_ready(arguments, timeout=HANG, cwd=folder, env=ENVIRONMENT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def bodies(folder: Path) -> int:
    """Count the processes that have run a counted body."""
    return len((folder / "bodies").read_text().splitlines())


ENGINES = ['topology="servers"', 'topology="allreduce"', 'engine="sim"']


@pytest.mark.parametrize("where", ENGINES)
def test_a_module_may_launch_while_it_is_imported(where: str, tmp_path: Path) -> None:
    write(
        tmp_path,
        {"mod.py": COUNTED + LAUNCH + f"print('pids', len(set(sl.launch(learner, {where}).returned)))"},
    )
    expected = "pids 1" if "sim" in where else "pids 2"
    assert expected in ran(tmp_path, "-c", "import mod")
    assert bodies(tmp_path) == 1


@pytest.mark.parametrize("where", ENGINES[::2])
def test_a_model_s_class_may_be_of_the_module(where: str, tmp_path: Path) -> None:
    code = f"""
    result = sl.train(
        Small(), Points(), loss=nn.functional.cross_entropy, optimizer=partial(Rate, lr=0.1), sync="hardsync", learners=2,
        evaluate=tested, {where},
    )
    print("is", type(result.model) is Small, result.history[0].metrics)
    """
    write(tmp_path, {"mod.py": COUNTED + TRAIN + textwrap.dedent(code)})
    assert "is True {'is': 1.0}" in ran(tmp_path, "-c", "import mod")
    assert bodies(tmp_path) == 1


def test_a_class_that_comes_back_is_the_module_s_own(tmp_path: Path) -> None:
    code = """
    class Found:
        pass

    def finds(session):
        return Found()

    print("own", [type(found) is Found for found in sl.launch(finds, learners=2).returned])
    """
    write(tmp_path, {"mod.py": COUNTED + textwrap.dedent(code)})
    assert "own [True, True]" in ran(tmp_path, "-c", "import mod")
    assert bodies(tmp_path) == 1


def test_a_package_may_launch_through_its_module(tmp_path: Path) -> None:
    """Cover a complete module of a package under import: importing the module runs the package's body."""
    run = "def run(): print('pids', len(sl.launch(learner).returned))"
    files = {
        "pkg/__init__.py": COUNTED + "from pkg import mod\nmod.run()",
        "pkg/mod.py": "import os, syncline as sl\n" + LAUNCH + run,
    }
    write(tmp_path, files)
    assert "pids 2" in ran(tmp_path, "-c", "import pkg.mod")
    assert bodies(tmp_path) == 1


def test_a_run_that_is_not_waited_for_stays_without_the_module(tmp_path: Path) -> None:
    """Cover learners that join, and optimizers that open, after the import."""
    code = """
    class Rate(torch.optim.SGD):
        pass

    def learner(session, ready):
        while not os.path.exists("imported"):
            pass
        model = nn.Linear(2, 1)
        opt = session.optimizer(model, partial(Rate, lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        opt.step()

    run = sl.launch(learner, Rate, sync="async", learners=1, wait=False)
    """
    write(tmp_path, {"mod.py": COUNTED + textwrap.dedent(code)})
    after = (
        "import mod; mod.run.add_learners(1); open('imported', 'w'); print('updates', mod.run.wait().updates)"
    )
    assert "updates 2" in ran(tmp_path, "-c", after)
    assert bodies(tmp_path) == 1


@pytest.mark.parametrize("at_import", [True, False])
def test_a_console_script_may_launch(at_import: bool, tmp_path: Path) -> None:
    start = "print('pids', len(sl.launch(learner).returned))"
    main = "def main(): pass\n" + start if at_import else f"def main(): {start}"
    script = "import sys\nfrom mod import main\nif __name__ == '__main__':\n    sys.exit(main())"
    write(tmp_path, {"mod.py": COUNTED + LAUNCH + main, "script.py": script})
    assert "pids 2" in ran(tmp_path, "script.py")
    assert bodies(tmp_path) == (1 if at_import else 3)


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_a_test_module_may_launch_when_pytest_imports_it(mode: str, tmp_path: Path) -> None:
    code = """
    AT_IMPORT = sl.launch(learner, learners=2).returned

    def test_import():
        assert len(set(AT_IMPORT)) == 2
    """
    write(tmp_path, {"test_it.py": COUNTED + LAUNCH + textwrap.dedent(code)})
    options = ["-q", "-p", "no:cacheprovider", f"--import-mode={mode}", "--rootdir=."]
    assert "1 passed" in ran(tmp_path, "-m", "pytest", *options, "test_it.py")
    assert bodies(tmp_path) == 1


def test_a_test_function_may_launch(tmp_path: Path) -> None:
    code = """
    def test_launch():
        assert len(set(sl.launch(learner, learners=2).returned)) == 2
    """
    write(tmp_path, {"test_it.py": COUNTED + LAUNCH + textwrap.dedent(code)})
    assert "1 passed" in ran(
        tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "test_it.py"
    )
    assert bodies(tmp_path) == 3


@pytest.mark.parametrize("call", ["launch", "train"])
def test_a_learner_that_reaches_the_call_by_an_import_is_one_clear_error(call: str, tmp_path: Path) -> None:
    """Use a cached function: it pickles by reference in any case, so learners import the module."""
    start = {
        "launch": "sl.launch(learner, cached)",
        "train": "sl.train(Small(), Points(), objective=cached, optimizer=partial(Rate, lr=0.1))",
    }[call]
    code = """
    from functools import lru_cache

    @lru_cache
    def cached(*given):
        return 1

    def learner(session, given):
        return given()
    """
    write(tmp_path, {"mod.py": COUNTED + TRAIN + textwrap.dedent(code) + start})
    out = ran(tmp_path, "-c", "import mod", code=1)
    assert f"LearnerError: learner 0: sl.{call} is called by the body of module 'mod'" in out.replace(
        "learner 1", "learner 0"
    )
    assert bodies(tmp_path) <= 3


def test_a_launch_inside_a_learner_s_function_works(tmp_path: Path) -> None:
    code = """
    def outer(session):
        return len(sl.launch(learner, learners=2).returned)

    print("inner", sl.launch(outer, learners=1).returned)
    """
    write(tmp_path, {"mod.py": COUNTED + LAUNCH + textwrap.dedent(code)})
    assert "inner [2]" in ran(tmp_path, "-c", "import mod")
    assert bodies(tmp_path) == 1


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_ends_a_run_of_an_import(number: int, code: int, tmp_path: Path) -> None:
    body = """
    def learner(session):
        model = nn.Linear(2, 1)
        opt = session.optimizer(model, partial(torch.optim.SGD, lr=0.1))
        for step in range(10**9):
            opt.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            opt.step()
            if step == 5 and session.rank == 0:
                print("going", flush=True)

    sl.launch(learner, learners=2)
    """
    write(tmp_path, {"mod.py": COUNTED + textwrap.dedent(body)})
    pipe = subprocess.PIPE
    with ReadyPython(
        [sys.executable, "-c", "import mod"], stdout=pipe, text=True, cwd=tmp_path, env=ENVIRONMENT
    ) as process:
        try:
            assert process.stdout is not None
            while "going" not in (line := process.stdout.readline()):
                assert line
            process.send_signal(number)
            process.communicate(timeout=HANG)
        finally:
            process.kill()
    assert process.returncode == code
    assert bodies(tmp_path) == 1

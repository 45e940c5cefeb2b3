"""The method written in docs/howto/batch_methods.md, which is not ours, runs, and goes on from its state."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline.batch import commands as c
from syncline.batch.methods import LBFGS
from tests.unit.batch.plain import Plain, drive
from tests.unit.batch.problems import logistic, quadratic

PAGE = Path(__file__).resolve().parents[3] / "docs" / "howto" / "batch_methods.md"


def barzilai_borwein(**options: Any) -> c.BatchMethod:
    """From the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "class BarzilaiBorwein" in block]
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    return names["BarzilaiBorwein"](**options)


def test_the_method_of_the_page_finds_minima_in_one_round_trip_an_iteration() -> None:
    for problem, minimum in ((quadratic(1e3, 10), 0.0), (logistic(), 0.083337739)):
        found = drive(barzilai_borwein(), problem.objective, problem.start)
        assert found.end is not None and found.end.loss == pytest.approx(minimum, rel=1e-6, abs=1e-8)
        assert found.plain.trips == found.plain.evaluations == found.end.iterations + 1


def test_the_method_of_the_page_goes_on_from_its_state() -> None:
    problem, method = logistic(), barzilai_borwein(tolerance=1e-3)
    whole = drive(method, problem.objective, problem.start, keep=True)
    state = json.loads(json.dumps(whole.states[9]))
    rest = drive(method, problem.objective, problem.start, state=state, shards=whole.saved[9])
    assert rest.end == whole.end and rest.x.tobytes() == whole.x.tobytes()


def test_every_command_does_what_the_page_says() -> None:
    plain = Plain(lambda x: (float(x @ x), 2 * x), ("x", "g", "a"), np.array([1.0, -2.0, 3.0]), parts=2)
    got = plain.run((c.Evaluate(), c.Dot("x.g", "x", "g"), c.Largest("top", "x")))
    assert got == {"loss": 14.0, "x.g": 28.0, "top": 3.0}
    plain.run((c.Fill("a", 2.0), c.Multiply("a", "x"), c.Axpy("a", 0.5, "g"), c.Scale("a", -1.0)))
    assert plain.whole("a").tolist() == [-3.0, 6.0, -9.0]
    plain.run((c.Copy("g", "a"), c.Swap("x", "g"), c.Combine("a", ((2.0, "a"), (1.0, "g")))))
    assert plain.whole("x").tolist() == [-3.0, 6.0, -9.0] and plain.whole("a").tolist() == [-5.0, 10.0, -15.0]


def test_memory_is_known_before_the_start() -> None:
    assert len(LBFGS(history=10).vectors) == 24
    assert barzilai_borwein().vectors == ("x", "g", "s", "y")

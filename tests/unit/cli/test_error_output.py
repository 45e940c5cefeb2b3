"""What goes wrong is one message and an exit code, and no output fails for a letter."""

from __future__ import annotations

import io
import sys
import warnings

import pytest
import typer

from syncline.cli.error_output import (
    FAILURE,
    INTERRUPTED,
    USAGE,
    message,
    told,
    warn_shortly,
    write_all_letters,
)
from syncline.errors import LearnerError, LostError, UsageError
from syncline.jobs import JobError

TRACE = "Traceback (most recent call last):\n  File x\nValueError: no luck"

MESSAGES: dict[str, tuple[Exception, int, str]] = {
    "usage": (UsageError("learners must be 1"), USAGE, "learners must be 1"),
    "a job's problems": (JobError(["a.toml:1: x", "a.toml:2: y"]), USAGE, "a.toml:1: x\na.toml:2: y"),
    "a run's": (LostError("all are lost"), FAILURE, "all are lost"),
    "a learner's": (
        LearnerError(2, TRACE),
        FAILURE,
        "learner 2 raised ValueError: no luck; --debug shows where",
    ),
    "what another process said": (
        LostError(f"a callback failed:\n\n{TRACE}"),
        FAILURE,
        "a callback failed: ValueError: no luck; --debug shows where",
    ),
    "nobody's": (KeyError("a\n b"), FAILURE, "KeyError: 'a\\n b'; --debug shows where"),
    "over two lines": (OSError("a\n   b"), FAILURE, "OSError: a b; --debug shows where"),
}


@pytest.mark.parametrize("error, code, words", MESSAGES.values(), ids=MESSAGES.keys())
def test_an_error_is_a_message_and_an_exit_code(
    error: Exception, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*, debug: bool) -> None:
        with told(debug):
            raise error

    with pytest.raises(typer.Exit) as ended:
        fails(debug=False)
    said = capsys.readouterr()
    assert (ended.value.exit_code, said.out) == (code, "")
    assert said.err == f"error: {message(error)}\n" and message(error) == words
    with pytest.raises(type(error)):
        fails(debug=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("debug", [True, False])
def test_ctrl_c_is_no_error_and_an_exit_is_left_alone(
    debug: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, told(debug):
        raise KeyboardInterrupt
    assert ended.value.exit_code == INTERRUPTED and capsys.readouterr().err == "interrupted\n"
    with pytest.raises(typer.Exit) as ended, told(debug):
        raise typer.Exit(7)
    assert ended.value.exit_code == 7 and capsys.readouterr().err == ""


def test_a_warning_is_one_line_without_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # so that it comes back
    warn_shortly()
    warnings.showwarning("mind this", UserWarning, "file.py", 3)
    assert capsys.readouterr().err == "warning: mind this\n"


@pytest.mark.parametrize(
    "encoding, text, written",
    [
        ("ascii", "λ 4 μ 16 σ –", "lambda 4 mu 16 sigma -"),
        ("ascii", "▏█▉ 3 × 4 ≤ √5 …", "### 3 x 4 <= sqrt5 ..."),
        ("ascii", "Zoë, ﬁne", "Zoe, fine"),
        ("ascii", "日本 🙂", "?? ?"),
        ("latin-1", "Zoë ×√", "Zoë ×sqrt"),
        ("utf-8", "λ █ 日本", "λ █ 日本"),
    ],
)
def test_where_not_all_letters_can_be_written_others_stand_for_them(
    encoding: str, text: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # which is no stream of bytes
    write_all_letters()
    print(text, end="", flush=True)
    assert out.getvalue().decode(encoding) == written

"""Ctrl-C in a hunt on several processes: it is heard once, and by the hunt alone."""

from __future__ import annotations

import signal

import pytest

from syncline.testing.hunt.search import _heard_once, _unheard


def test_the_second_ctrl_c_does_not_leave_workers_behind() -> None:
    before = signal.getsignal(signal.SIGINT)
    with _heard_once():
        with _unheard():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before

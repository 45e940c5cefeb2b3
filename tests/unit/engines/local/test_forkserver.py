"""The fork server: when it makes its next children cheaper."""

from __future__ import annotations

import socket

import pytest

from syncline.engines.local import forkserver
from syncline.engines.local.control_channel import Channel


def test_pages_are_joined_once_after_many_children_and_never_during_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[int] = []
    monkeypatch.setattr(forkserver, "_join_pages", lambda: joined.append(server._started))
    mine, theirs = socket.socketpair()
    run, other = Channel.pair()
    server = forkserver._Server(theirs)
    with mine, theirs, other:
        server._started = forkserver.MANY - 1
        server._rest()
        server._started, server._runs = forkserver.MANY, {run.fileno(): run}
        server._rest()
        assert not joined
        server._runs = {}
        server._rest()
        server._started += forkserver.MANY
        server._rest()
        run.close()
    assert len(joined) == 1

"""Which network interfaces a group speaks through."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.engines.collectives import gloo_devices


class Kind:
    """In place of torch's: says what it was asked for."""

    @staticmethod
    def create_device(**words: str) -> dict[str, str]:
        return words

    @staticmethod
    def create_default_device() -> str:
        return "default"


@pytest.mark.parametrize(
    "host, named, expected",
    [
        (None, "", ["default"]),
        (None, "eth1", [{"interface": "eth1"}]),
        (None, "eth1,eth2", [{"interface": "eth1"}, {"interface": "eth2"}]),
        ("127.0.0.1", "eth1", [{"hostname": "127.0.0.1"}]),
    ],
)
def test_interfaces_that_the_user_names_are_used(
    host: str | None, named: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    assert gloo_devices(Kind, host) == expected

"""The way from the caller's node to an agent."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from syncline.engines.authentication import Secret, Stranger, connect
from syncline.errors import RunError


@dataclass(frozen=True, slots=True)
class Way:
    """From the caller's node to an agent."""

    address: tuple[str, int]
    secret: Secret
    node: str
    home: str
    machine: str = ""  # its name, where it is another than the caller's

    def connect(self) -> socket.socket:
        try:
            return connect(self.address, self.secret)
        except (OSError, Stranger) as error:
            raise self.cut(error) from error

    def cut(self, error: Exception) -> RunError:
        host, port = self.address
        return RunError(
            f"{self.home} cannot reach the agent on {self.node} at {host}:{port}: {error}; open that way between them (any port)"
        )

"""The way from the caller's node to an agent: connections, and what learners run, once for a node."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass

from syncline.engines.local.packing import Parcel
from syncline.engines.ray.authentication import Secret, Stranger, connect
from syncline.engines.ray.bulk_connection import Connection, Lost, ready
from syncline.engines.ray.frame_kinds import AGENT, Kind, Objects, receive_object
from syncline.errors import RunError

LOOK = 0.5  # seconds between looks whether a node still lives


@dataclass(frozen=True, slots=True)
class Way:
    """From the caller's node to an agent."""

    address: tuple[str, int]
    secret: Secret
    node: str
    home: str

    def connect(self) -> socket.socket:
        try:
            return connect(self.address, self.secret)
        except (OSError, Stranger) as error:
            raise self._cut(error) from error

    def _cut(self, error: Exception) -> RunError:
        host, port = self.address
        return RunError(
            f"{self.home} cannot reach the agent on {self.node} at {host}:{port}: {error}; open that way between them (any port)"
        )

    def send_task(self, task: Parcel, alive: Callable[[], bool]) -> None:
        """Once for a node: its learners share it."""
        objects = Objects()
        with self.connect() as end:
            connection = Connection(end, run=self.secret.run, incarnation=AGENT, into=objects.into)
            try:
                objects.send(connection, Kind.TASK, task)
                while not connection.flush() or receive_object(connection, objects, LOOK) is None:
                    ready(end, select.POLLOUT, LOOK)
                    if not alive():
                        raise Lost("it does not answer any more")
            except Lost as error:
                raise self._cut(error) from error

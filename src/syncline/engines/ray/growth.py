"""Nodes that join the Ray cluster while a run goes on: looked for on a thread of the caller's, each is made one of the run's.

One that cannot be used is said once, and not tried again. Not responsible for what becomes of it in the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from syncline.engines.ray.placement import Node

EVERY = 1.0  # seconds between two looks


class Growth:
    """`nodes` are those at hand, `settle` makes one of them the run's; those of the beginning are known."""

    def __init__(
        self, nodes: Callable[[], list[Node]], known: Iterable[Node], settle: Callable[[Node], None]
    ) -> None:
        self._nodes, self._settle = nodes, settle
        self._known = {node.id for node in known}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="syncline-growth", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while not self._closing.wait(EVERY):
            for node in self._new():
                self._known.add(node.id)
                if not self._closing.is_set():
                    self._settle(node)

    def _new(self) -> list[Node]:
        try:
            return [node for node in self._nodes() if node.id not in self._known]
        except (
            Exception
        ):  # the cluster's own account of it may be away for a while; whether nodes live is not its matter
            return []

    def close(self) -> None:
        """Nobody else joins; what is being settled is given up first."""
        self._closing.set()
        self._thread.join()

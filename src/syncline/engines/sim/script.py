"""Playing a script in a simulated run: its moments are moments of virtual time, or versions as the leading shard makes them.

Not responsible for what a line may say (`engines.script`), nor for carrying it out (the world).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from syncline.engines.script import Fault, parse_script


class Script:
    """What is still to happen; lines of the same moment happen in the order they stand."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = list(faults)
        self.timed = [fault for fault in self.faults if fault.version is None]
        self._versioned = [fault for fault in self.faults if fault.version is not None]

    @classmethod
    def of(cls, script: str | Iterable[Fault] | None) -> Script:
        """From a text, or lines that are parsed already."""
        return cls(parse_script(script) if isinstance(script, str) else script or ())

    def reached(self, version: int, play: Callable[[Fault], None]) -> None:
        """The first table has this version now."""
        if not self._versioned:
            return
        due = [fault for fault in self._versioned if fault.due(version, 0.0)]
        self._versioned = [fault for fault in self._versioned if fault not in due]
        for fault in due:
            play(fault)

    @property
    def missed(self) -> list[Fault]:
        """Lines whose version has not come."""
        return list(self._versioned)

"""Scripts of events: who is killed, paused or added, and when. What a line may say; playing it is the engines' part.

One line or `;` per event: `kill learner 2 at version 30`, `add 2 at 60 s`, `pause shard 1 for 2 s at 4 s`,
`change to softsync:1 at version 60`, `stop at 10 s`, `kill node 2 at version 20`, `cut link 0-2 for 2 s at 3 s`. Moments are
versions of the first table (`step` is another word for it) or seconds since the run began.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.errors import UsageError

_SECONDS = r"\d+(?:\.\d*)?|\.\d+"
_LINE = re.compile(
    rf"(?:(?P<action>kill|pause)\s+(?P<role>learner|shard|node)\s+(?P<rank>\d+)(?:\s+for\s+(?P<length>{_SECONDS})\s*s)?"
    rf"|(?P<cut>cut)\s+link\s+(?P<one>\d+)-(?P<other>\d+)\s+for\s+(?P<cut_length>{_SECONDS})\s*s"
    r"|add\s+(?P<count>0*[1-9]\d*)(?:\s+learners?)?"
    r"|change\s+to\s+(?P<dial>\S+)"
    r"|(?P<stop>stop))"
    rf"\s+at\s+(?:(?:version|step)\s+(?P<version>\d+)|(?P<seconds>{_SECONDS})\s*s)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of a script."""

    text: str
    action: str  # "kill", "pause", "cut", "add", "change", "stop"
    role: str = ""  # "learner", "shard", "node", "link"
    rank: int = 0
    other: int = 0  # the node at a link's other end
    length: float = 0.0  # seconds of a pause, or of a cut
    count: int = 0
    dial: str = ""
    version: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, line: str) -> Fault:
        match = _LINE.fullmatch(line.strip())
        if match is None or (match["action"] == "pause") != (match["length"] is not None):
            raise UsageError(
                f"no fault: {line.strip()!r}; write for example 'kill learner 2 at version 30', 'add 2 at version 50', "
                "'pause shard 1 for 2 s at 4 s', 'change to softsync:1 at version 60', 'stop at 10 s', 'kill node 2 at version 20', "
                "'cut link 0-2 for 2 s at 3 s'"
            )
        action = (
            match["action"]
            or match["cut"]
            or ("add" if match["count"] else "change" if match["dial"] else "stop")
        )
        return cls(
            text=line.strip(),
            action=action,
            role="link" if match["cut"] else match["role"] or "",
            rank=int(match["rank"] or match["one"] or 0),
            other=int(match["other"] or 0),
            length=float(match["length"] or match["cut_length"] or 0),
            count=int(match["count"] or 0),
            dial=match["dial"] or "",
            version=int(match["version"]) if match["version"] else None,
            seconds=float(match["seconds"]) if match["seconds"] else None,
        )

    def due(self, version: int, seconds: float) -> bool:
        return version >= self.version if self.version is not None else seconds >= (self.seconds or 0.0)


def parse_script(script: str) -> list[Fault]:
    """All lines, in the order they stand."""
    return [Fault.parse(line) for line in re.split(r"[;\n]", script) if line.strip()]

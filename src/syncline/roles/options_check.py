"""Do learners in lockstep agree about their group options? One warning if not (M4)."""

from __future__ import annotations

from collections.abc import Iterable

from syncline import messages as m
from syncline.ports import ServerPort
from syncline.protocols.folding import Ticket
from syncline.roles.log_applier import LogApplier


class OptionsCheck:
    """Looks at the gradients of a fold when options have changed."""

    def __init__(self, port: ServerPort, replay: LogApplier) -> None:
        self._port, self._replay, self._warned = port, replay, False

    def check(self, table: int, tickets: Iterable[Ticket], *, lockstep: bool) -> None:
        if lockstep and not self._warned:
            self._compare({t.rank: self._replay.options(table, t.learner, t.number) for t in tickets})

    def _compare(self, options: dict[int, object]) -> None:
        first = next(iter(options.values()))
        differ = sorted(rank for rank, option in options.items() if option is not first and option != first)
        if differ:
            self._warned = True
            ranks = sorted(options)
            self._port.tell(
                m.Warned(
                    f"learners {ranks} disagree about the options of their parameter groups (ranks {differ} differ "
                    f"from rank {ranks[0]}); each update uses those of the learner furthest along. Step the same "
                    "scheduler in every learner.",
                    "options",
                )
            )

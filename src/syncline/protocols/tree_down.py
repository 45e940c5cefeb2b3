"""Versions on their way down a tree (R7, R8, M14): copies of single versions, which may lag.

`Relay` fetches a version once and answers its children with it. `Downcast` passes on whatever is newest, unasked, to each child as soon
as the way to it is free. `Buffers` is a learner's end of that: it computes on one copy while the next is filled. Not responsible
for the weights, nor for who may go on (`waiting`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Fetch:
    """To the node above: this version; `exact`: no newer one."""

    version: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Give:
    """To a child: a copy of this version, for what it asked with that number."""

    child: int
    number: int
    version: int


class Relay:
    """A node's copies: each version comes from above once, however many ask for it; at most one is on its way.

    `keep`: versions, of the newest (k + 1 under delayed:k, whose readers need exactly theirs).
    """

    def __init__(self, keep: int = 1) -> None:
        self._keep = keep
        self.versions: list[int] = []
        self._asked: Fetch | None = None
        self._waiting: list[tuple[int, int, Fetch]] = []  # child, number, what it needs

    def ask(self, child: int, number: int, version: int, *, exact: bool = False) -> list[Fetch | Give]:
        """A child may read this version or, unless it is to be exact, a newer one."""
        self._waiting.append((child, number, Fetch(version, exact)))
        return self._answer()

    def arrived(self, version: int) -> list[Fetch | Give]:
        """A copy of this version is here, complete."""
        self._asked = None
        if version not in self.versions:
            self.versions = sorted([*self.versions, version])[-self._keep :]
        return self._answer(just=version)

    def lose(self, child: int) -> None:
        self._waiting = [each for each in self._waiting if each[0] != child]

    def moved(self) -> list[Fetch | Give]:
        """The node above is another: what was asked of the former is asked again."""
        self._asked = None
        return self._answer()

    def _answer(self, just: int | None = None) -> list[Fetch | Give]:
        out: list[Fetch | Give] = []
        left = []
        here = {*self.versions, *([] if just is None else [just])}
        newest = max(here, default=-1)
        for child, number, needed in self._waiting:
            version = needed.version if needed.exact else max(newest, needed.version)
            if version in here:
                out.append(Give(child, number, version))
            else:
                left.append((child, number, needed))
        self._waiting = left
        if left and self._asked is None:
            exact = [needed for _, _, needed in left if needed.exact]
            by_version = attrgetter("version")
            self._asked = min(exact, key=by_version) if exact else max((n for *_, n in left), key=by_version)
            out.append(self._asked)
        return out


@dataclass(frozen=True, slots=True)
class Send:
    """To a child, unasked: the copy of this version; the way is taken until it is `sent`."""

    child: int
    version: int


class Downcast:
    """Whatever is newest flows to every child, one copy at a time; a slow child misses versions and holds nobody up."""

    def __init__(self, children: Iterable[int]) -> None:
        self.version = -1
        self._sent = dict.fromkeys(children, -1)
        self._busy: set[int] = set()

    def arrived(self, version: int) -> list[Send]:
        """A newer version is here, complete."""
        self.version = max(self.version, version)
        return self._send()

    def sent(self, child: int) -> list[Send]:
        """The child has its copy, and room for another."""
        self._busy.discard(child)
        return self._send()

    def join(self, child: int) -> list[Send]:
        self._sent[child] = -1
        self._busy.discard(child)
        return self._send()

    def lose(self, child: int) -> None:
        self._sent.pop(child, None)
        self._busy.discard(child)

    def _send(self) -> list[Send]:
        late = [c for c, version in self._sent.items() if version < self.version and c not in self._busy]
        self._busy.update(late)
        self._sent |= dict.fromkeys(late, self.version)
        return [Send(child, self.version) for child in late]


class Buffers:
    """A learner's two copies: it computes on one, the other is filled. `swap` is a change of pointers, never a wait.

    Copies may be filled again before they were used. Who found its copy half filled gets the next one held until it is used:
    it cannot be passed by for ever.
    """

    def __init__(self, version: int) -> None:
        self.version = version  # that it computes on
        self.next: int | None = None  # complete in the other
        self._filling: int | None = None
        self._missed = False

    @property
    def room(self) -> bool:
        """The other may be filled."""
        return self._filling is None and not (self._missed and self.next is not None)

    def fills(self, version: int) -> bool:
        """It is this one that is on its way."""
        return self._filling == version

    def begin(self, version: int) -> None:
        if not self.room:
            raise AssertionError(f"version {version} would overwrite {self._filling or self.next}")
        self._filling, self.next = version, None

    def complete(self) -> None:
        self.next, self._filling = self._filling, None

    def drop(self) -> None:
        """What was being filled does not come."""
        self._filling, self._missed = None, False

    def swap(self) -> int:
        """In `step()`: the version that it computes on from now on."""
        if self.next is None:
            self._missed |= self._filling is not None
            return self.version
        self.version, self.next = max(self.version, self.next), None
        self._missed = False
        return self.version

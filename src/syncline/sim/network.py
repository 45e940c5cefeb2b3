"""The network of a cluster: when data that is sent arrives. Pure; time is passed in and never goes back.

Every machine has one card, which carries one transfer at a time each way; what does not fit waits. Inside a machine
data moves at the memory's speed. Messages without bulk data only take the latency. What one machine sends to
another arrives in the order it was sent, also where messages are delayed at random, or a link is cut for a while: what was
sent meanwhile leaves when it is mended. Bulk may come after its note, late, or never because its sender died (`Late`, on request).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter, deque

from syncline.cluster import Cluster, uniform
from syncline.sim.clock import Action, Clock

SHARES = (0.0, 0.0, 0.01, 0.1, 1.0)  # of a step: how late bulk comes at most


class Way:
    """One direction of a card: when it is taken. Spans that touch are one."""

    __slots__ = ("_ends", "_starts", "busy")

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self.busy = 0.0  # seconds

    def book(self, now: float, ready: float, seconds: float) -> float:
        """The start of the first free time of that length, not before `ready`; it is taken then."""
        self.busy += seconds
        starts, ends = self._starts, self._ends
        if ends and ends[0] <= now:
            past = bisect_right(ends, now)
            del starts[:past], ends[:past]
        if not ends or ends[-1] < ready:
            starts.append(ready)
            ends.append(ready + seconds)
            return ready
        place = bisect_right(ends, ready)  # the first span that ends later
        start = ready
        while place < len(starts) and starts[place] < start + seconds:
            start = ends[place]
            place += 1
        end = start + seconds
        before = place > 0 and ends[place - 1] == start
        after = place < len(starts) and starts[place] == end
        if before and after:
            ends[place - 1] = ends[place]
            del starts[place], ends[place]
        elif before:
            ends[place - 1] = end
        elif after:
            starts[place] = start
        else:
            starts.insert(place, start)
            ends.insert(place, end)
        return start


class SimNetwork:
    """All cards of a cluster, made as they are used."""

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self._card, self._memory = cluster.card, cluster.memory
        self._far, self._near = cluster.card.latency, cluster.memory.latency  # of messages without bulk data
        self._out: dict[int, Way] = {}
        self._in: dict[int, Way] = {}
        self._last: dict[int, float] = {}  # source and target in one number -> the last arrival
        self._delay, self._seed = cluster.delay, seed
        self._shaky = cluster.delay > 0  # else nothing is ever late
        self._cut: dict[frozenset[int], float] = {}  # two machines -> when their link is mended
        self._drawn: Counter[int] = Counter()
        self.moved = 0  # bytes between machines
        self.copied = 0  # bytes inside machines

    def send(self, now: float, source: int, target: int, nbytes: int = 0) -> float:
        """When what leaves the source now (or as soon as its card is free) has arrived."""
        if not nbytes:
            arrival = now + (self._near if source == target else self._far)
        elif source == target:
            self.copied += nbytes
            link = self._memory
            arrival = now + link.latency + (link.setup + link.seconds(nbytes))
        else:
            self.moved += nbytes
            arrival = self._over_cards(now, source, target, nbytes)
        pair = (source << 32) + target
        if self._shaky and source != target:
            arrival += self._held(now, source, target, pair)
        last = self._last.get(pair, 0.0)
        if last > arrival:
            return last
        self._last[pair] = arrival
        return arrival

    def cut(self, one: int, other: int, until: float) -> None:
        """Nothing leaves the one for the other before then."""
        pair = frozenset((one, other))
        self._cut[pair] = max(until, self._cut.get(pair, 0.0))
        self._shaky = True

    def late(self, now: float, arrival: float, source: int, target: int) -> float:
        """When something arrives that usually does so then, over this way as it is."""
        if not self._shaky or source == target:
            return arrival
        pair = (source << 32) + target
        arrival = max(arrival + self._held(now, source, target, pair), self._last.get(pair, 0.0))
        self._last[pair] = arrival
        return arrival

    def _held(self, now: float, source: int, target: int, pair: int) -> float:
        """Seconds: until the link is mended, and a delay drawn at random."""
        cut = max(0.0, self._cut.get(frozenset((source, target)), 0.0) - now)
        if not self._delay:
            return cut
        self._drawn[pair] += 1
        return cut - self._delay * math.log(uniform(self._seed, pair, self._drawn[pair]))

    def _over_cards(self, now: float, source: int, target: int, nbytes: int) -> float:
        link = self._card
        seconds = link.seconds(nbytes)
        if not seconds:
            return now + link.latency + link.setup
        sender, receiver = self._out.get(source), self._in.get(target)
        if sender is None:
            sender = self._out[source] = Way()
        if receiver is None:
            receiver = self._in[target] = Way()
        out = sender.book(now, now + link.setup, seconds)
        return receiver.book(now, out + link.latency, seconds) + seconds

    def cards(self) -> dict[int, tuple[float, float]]:
        """Seconds for which each machine's card was sending, and receiving."""
        idle = Way()
        machines = sorted(self._out.keys() | self._in.keys())
        return {each: (self._out.get(each, idle).busy, self._in.get(each, idle).busy) for each in machines}


class Late:
    """Draws how late bulk comes, and whether it does."""

    def __init__(self, seed: int, step: float) -> None:
        self._draw, self._step = random.Random(f"{seed}/late"), step

    def delay(self) -> float:
        return self._draw.choice(SHARES) * self._draw.random() * self._step

    def lost(self) -> bool:
        return self._draw.random() < 0.5


class Line:
    """What one learner says to the leading shard, in order.

    A note is handed on when its bulk is there too, and so is whatever its sender said after it (M12).
    """

    def __init__(self, clock: Clock, late: Late) -> None:
        self._clock, self._late = clock, late
        self._waiting: deque[tuple[float, Action, Action | None]] = deque()
        self._dead = self._cut = False  # its sender is; and something of it never came

    def arrived(self, hand_on: Action, bulk: Action | None = None, least: float = 0.0) -> None:
        """A note is there; `bulk` puts in its place what comes with it, not before `least`."""
        if self._cut:
            return
        due = self._clock.now
        if bulk is not None and self._dead:
            if self._late.lost():
                self._cut = True
                return
        elif bulk is not None:
            due = max(least, due + self._late.delay())
        if self._waiting:
            due = max(due, self._waiting[-1][0])
        self._waiting.append((due, hand_on, bulk))
        if due > self._clock.now:
            self._clock.at(due, self._hand_on)
        else:
            self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._clock.now:
            _, hand_on, bulk = self._waiting.popleft()
            if bulk is not None:
                bulk()
            hand_on()

    def end(self) -> float:
        """Its sender died: what has not come may never come. When the rest is there."""
        self._dead = True
        for index, (_, _, bulk) in enumerate(self._waiting):
            if bulk is not None and self._late.lost():
                self._cut = True
                self._waiting = deque(list(self._waiting)[:index])
                break
        return self._waiting[-1][0] if self._waiting else 0.0

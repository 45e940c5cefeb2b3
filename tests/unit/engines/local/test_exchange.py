"""The exchange (M11) over all interleavings of small cases, and between real processes.

`Memory` stands in for shared memory: every load, every store and every single word of a record is a point at
which another process may run. `explore` runs a case in every order. A state that was seen before (the same
memory, the same things read by everybody) has the same future and is not followed again.
"""

import os
import random
import signal
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

from syncline.engines.local.exchange import LINE, RECORD, Drafts, Replies, Ring, Shares
from syncline.engines.local.shared_memory import Region, SharedWords

FORM = struct.Struct("=2q")
Process = Callable[[], None]


class Stuck(AssertionError):
    """Everybody waits."""


class Memory:
    """Words whose every access is a scheduling point (the operations of `SharedWords`)."""

    def __init__(self, words: int, numbers: dict[Any, int] | None = None) -> None:
        self.words = array("q", bytes(8 * words))
        self.pasts: dict[Any, int] = {}  # process -> all that it has done and read, as one number
        self.news: dict[Any, bool] = {}  # process -> did another store since its attempt began?
        self.asleep: set[Any] = set()
        self._numbers = {} if numbers is None else numbers

    def _add(self, what: Any) -> None:
        me = getcurrent()
        if me in self.pasts:
            self.pasts[me] = self._numbers.setdefault((self.pasts[me], what), len(self._numbers) + 1)

    def _point(self, what: Any) -> None:
        self._add(what)
        if getcurrent().parent is not None:
            getcurrent().parent.switch()

    def load(self, cell: int) -> int:
        self._point("load")
        self._add(self.words[cell])
        return self.words[cell]

    def store(self, cell: int, value: int) -> None:
        self._point("store")
        self.words[cell] = value
        for other in self.news:
            self.news[other] |= other is not getcurrent()

    def write(self, cell: int, packed: bytes) -> None:
        for index, (word,) in enumerate(struct.iter_unpack("=q", packed)):
            self.store(cell + index, word)

    def read(self, cell: int, nbytes: int) -> bytes:
        return b"".join(struct.pack("=q", self.load(cell + index)) for index in range(nbytes // 8))

    def until(self, attempt: Callable[[], Any]) -> Any:
        """Try again whenever somebody stored something; an attempt without a result leaves no trace."""
        me = getcurrent()
        while True:
            past, self.news[me] = self.pasts[me], False
            if (result := attempt()) not in (None, False):
                return result
            self.pasts[me] = past
            while not self.news[me]:
                self.asleep.add(me)
                me.parent.switch()
            self.asleep.discard(me)

    def state(self) -> bytes:
        """Of everybody; equal states have equal futures."""
        processes = [
            (past << 3) + (self.news[p] << 2) + ((p in self.asleep) << 1) + p.dead
            for p, past in self.pasts.items()
        ]
        return blake2b(self.words.tobytes() + array("q", processes), digest_size=16).digest()


Case = Callable[[Memory], tuple[Sequence[Process], Callable[[], None]]]


@dataclass
class Explorer:
    """Depth first over all schedules of a case, by running prefixes again."""

    case: Case
    words: int
    known: set[bytes] = field(default_factory=set)
    numbers: dict[Any, int] = field(default_factory=dict)
    runs: int = 0

    def explore(self) -> "Explorer":
        prefix: list[int] | None = []
        while prefix is not None:
            self.runs += 1
            prefix = self._following(*self._run(prefix))
        return self

    def _run(self, prefix: list[int]) -> tuple[list[int], list[int]]:
        memory = Memory(self.words, self.numbers)
        processes, check = self.case(memory)
        tasks = [greenlet(process) for process in processes]
        memory.pasts = dict.fromkeys(tasks, 0)
        memory.news = dict.fromkeys(tasks, False)
        chosen: list[int] = []
        widths: list[int] = []
        while running := [task for task in tasks if not task.dead]:
            ready = [task for task in running if task not in memory.asleep or memory.news[task]]
            if not ready:
                raise Stuck(f"after the schedule {chosen}")
            if len(chosen) >= len(prefix) and len(ready) > 1:
                if (state := memory.state()) in self.known:
                    for task in running:
                        task.throw()  # ends it, and frees its stack
                    break
                self.known.add(state)
            chosen.append(prefix[len(chosen)] if len(chosen) < len(prefix) else 0)
            widths.append(len(ready))
            ready[chosen[-1]].switch()
        else:
            check()
        return chosen, widths

    @staticmethod
    def _following(chosen: list[int], widths: list[int]) -> list[int] | None:
        while chosen:
            last = chosen.pop()
            if last + 1 < widths[len(chosen)]:
                return [*chosen, last + 1]
        return None


def explore(case: Case, words: int) -> Explorer:
    return Explorer(case, words).explore()


# -- the explorer itself -----------------------------------------------------------------------------------


def counting(memory: Memory) -> tuple[list[Process], Callable[[], None]]:
    def add() -> None:
        memory.store(0, memory.load(0) + 1)

    return [add, add], lambda: outcomes.add(memory.words[0])


outcomes: set[int] = set()


def test_the_explorer_finds_every_outcome_of_a_race() -> None:
    outcomes.clear()
    explore(counting, 1)
    assert outcomes == {1, 2}


def test_the_explorer_finds_a_deadlock() -> None:
    def case(memory: Memory) -> tuple[list[Process], Callable[[], None]]:
        def wait_for(cell: int) -> Process:
            return lambda: memory.store(1 - cell, memory.until(lambda: memory.load(cell)))

        return [wait_for(0), wait_for(1)], lambda: None

    with pytest.raises(Stuck):
        explore(case, 2)


# -- rings -------------------------------------------------------------------------------------------------


def record_of(number: int) -> tuple[int, int]:
    return number + 1, (number + 1) * 1001


def ring_case(kind: type[Ring], *, capacity: int, readers: int, records: int) -> tuple[Case, int]:
    """The writer waits for room, every reader for records: all arrive, whole, once, in order."""

    def case(memory: Memory) -> tuple[list[Process], Callable[[], None]]:
        ring = kind(memory, 0, capacity=capacity, form=FORM, readers=readers)
        got: list[list[Any]] = [[] for _ in range(readers)]

        def write() -> None:
            for number in range(records):
                memory.until(lambda number=number: ring.push(record_of(number)))

        def read(reader: int) -> None:
            for number in range(records):
                got[reader].append(memory.until(lambda: ring.pop(reader)))
                assert got[reader][-1] == record_of(number)

        def check() -> None:
            assert got == [[record_of(number) for number in range(records)]] * readers
            assert all(ring.pop(reader) is None for reader in range(readers))

        return [write, *(lambda reader=reader: read(reader) for reader in range(readers))], check

    return case, Ring.words(capacity, readers)


@pytest.mark.parametrize("capacity, readers, records", [(1, 1, 3), (2, 1, 4), (1, 2, 3), (2, 2, 2)])
def test_a_ring_loses_repeats_and_tears_nothing(capacity: int, readers: int, records: int) -> None:
    case, words = ring_case(Ring, capacity=capacity, readers=readers, records=records)
    assert explore(case, words).runs > 100


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_full_ring_refuses_and_forgets_nothing(capacity: int) -> None:
    def case(memory: Memory) -> tuple[list[Process], Callable[[], None]]:
        ring = Ring(memory, 0, capacity=capacity, form=FORM)
        accepted: list[Any] = []
        got: list[Any] = []

        def write() -> None:
            accepted.extend(r for r in map(record_of, range(capacity + 2)) if ring.push(r))

        def read() -> None:
            got.extend(r for r in (ring.pop() for _ in range(2)) if r is not None)

        def check() -> None:
            assert capacity <= len(accepted) <= capacity + len(got)
            while (record := ring.pop()) is not None:
                got.append(record)
            assert got == accepted

        return [write, read], check

    assert explore(case, Ring.words(capacity)).runs > 50


def test_a_record_too_large_is_refused_when_the_ring_is_made() -> None:
    with pytest.raises(ValueError, match="136 bytes"):
        Ring(Memory(99), 0, capacity=1, form=struct.Struct("=17q"))


def test_words_of_different_writers_share_no_cache_line() -> None:
    memory = Memory(Ring.words(2, 2))
    ring = Ring(memory, 0, capacity=2, form=FORM, readers=2)
    assert ring.push((7, 7)) and ring.pop(1) == (7, 7)
    changed = [cell for cell, word in enumerate(memory.words) if word]
    assert changed == [0, 2 * LINE, 3 * LINE, 3 * LINE + 1]
    assert ring.push((8, 8)) and not ring.push((9, 9))  # reader 0 has read nothing
    assert len(memory.words) == 3 * LINE + 2 * RECORD


# -- an outbox ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies_after", range(3))
def test_who_takes_an_outbox_over_finds_what_nobody_has_passed_on(dies_after: int) -> None:
    """One slot: each record is passed on before the next is written; the first reader dies before it passes one on."""
    capacity, rounds = 2, 3
    lost = Ring.words(capacity, 0)
    passed = lost + LINE

    def case(memory: Memory) -> tuple[list[Process], Callable[[], None]]:
        outbox = Ring(memory, 0, capacity=capacity, form=FORM, readers=0)
        drafts = Drafts(memory, passed, shards=1, slots=1)
        taken: list[int] = []

        def learn() -> None:
            for number in range(rounds):
                outbox.push((number, 10 + number))
                memory.until(lambda number=number: drafts.freed(0, number))

        def read(start: int, stop: int) -> None:
            for index in range(start, stop):
                memory.until(lambda index=index: outbox.written > index)
                number, value = outbox.read(index)
                if not drafts.freed(0, int(number)):
                    assert value == 10 + number
                    taken.append(int(number))
                    drafts.free(0, 0, int(number))

        def first() -> None:
            read(0, dies_after)
            memory.store(lost, 1)

        def second() -> None:
            memory.until(lambda: memory.load(lost))
            read(max(0, outbox.written - 1), rounds)

        def check() -> None:
            assert taken == list(range(rounds))

        return [learn, first, second], check

    assert explore(case, passed + LINE).runs > 5


# -- replies and shares ------------------------------------------------------------------------------------


def replies_case(kind: type[Replies]) -> tuple[Case, int]:
    """Two shards answer one learner's tickets; both have done their work when it goes on."""
    published, worked = 2 * LINE, [2 * LINE + 1, 2 * LINE + 2]
    readings = ((5, 1, 0), (9, 2, 1))  # version, dial, keep

    def case(memory: Memory) -> tuple[list[Process], Callable[[], None]]:
        replies = kind(memory, 0, shards=2)
        got: list[tuple[int, int, int]] = []

        def shard(index: int) -> None:
            for number, reading in enumerate(readings):
                memory.until(lambda number=number: memory.load(published) > number)
                memory.store(worked[index], number + 1)
                replies.release(index, number, *reading)

        def learn() -> None:
            for number in range(len(readings)):
                memory.store(published, number + 1)
                got.append(memory.until(lambda number=number: replies.released(number)))
                assert all(memory.load(cell) == number + 1 for cell in worked)

        def check() -> None:
            assert tuple(got) == readings

        return [learn, lambda: shard(0), lambda: shard(1)], check

    return case, 3 * LINE


def drafts_case(kind: type[Drafts]) -> tuple[Case, int]:
    """A learner uses one slot again when both shards need no more what lay there."""
    slot, published, taken = 2 * LINE, 2 * LINE + 1, [2 * LINE + 2, 2 * LINE + 3]
    rounds = 3

    def case(memory: Memory) -> tuple[list[Process], Callable[[], None]]:
        drafts = kind(memory, 0, shards=2, slots=2)

        def shard(index: int) -> None:
            for number in range(rounds):
                memory.until(lambda number=number: memory.load(published) > number)
                assert memory.load(slot) == 10 + number
                memory.store(taken[index], number + 1)
                drafts.free(index, 1, number)

        def learn() -> None:
            for number in range(rounds):
                memory.store(slot, 10 + number)
                memory.store(published, number + 1)
                memory.until(lambda number=number: drafts.freed(1, number))
                assert all(memory.load(cell) == number + 1 for cell in taken)
                assert not drafts.freed(0, number)

        return [learn, lambda: shard(0), lambda: shard(1)], lambda: None

    return case, 3 * LINE


def shares_case(kind: type[Shares], rounds: int = 3) -> tuple[Case, int]:
    sizes = (2, 1)

    def values(shard: int, number: int) -> list[float]:
        return [number * 10.0 + shard] * sizes[shard]

    def case(memory: Memory) -> tuple[list[Process], Callable[[], None]]:
        shares = kind(memory, 0, sizes=sizes)

        def shard(index: int) -> None:
            for number in range(1, 1 + rounds):
                shares.tell(index, number, values(index, number))
                found = memory.until(lambda number=number: shares.all(number))
                assert found == [values(0, number), values(1, number)]

        return [lambda: shard(0), lambda: shard(1)], lambda: None

    return case, Shares.words(sizes)


def test_a_version_is_read_whole_and_only_when_every_shard_has_released_it() -> None:
    case, words = replies_case(Replies)
    assert explore(case, words).runs > 100


def test_a_slot_is_used_again_only_when_every_shard_has_freed_it() -> None:
    case, words = drafts_case(Drafts)
    assert explore(case, words).runs > 100


def test_everybody_reads_everybodys_values_of_the_same_round() -> None:
    case, words = shares_case(Shares)
    assert explore(case, words).runs > 100


def test_shards_that_disagree_about_a_version_are_an_error() -> None:
    replies = Replies(Memory(2 * LINE), 0, shards=2)
    replies.release(0, 4, 7)
    assert replies.released(4) is None
    replies.release(1, 4, 8)
    with pytest.raises(AssertionError, match=r"ticket 4 with versions \[7, 8\]"):
        replies.released(4)


# -- would it notice? --------------------------------------------------------------------------------------


class HeadFirst(Ring):
    def push(self, record: Sequence[int | float]) -> bool:
        head = self._cells.load(self._head)
        if head - min(self._cells.load(tail) for tail in self._tails) >= self._capacity:
            return False
        self._cells.store(self._head, head + 1)
        self._cells.write(self._records + RECORD * (head % self._capacity), self._form.pack(*record))
        return True


class TailFirst(Ring):
    def pop(self, reader: int = 0) -> tuple[int | float, ...] | None:
        tail = self._cells.load(self._tails[reader])
        if tail == self._cells.load(self._head):
            return None
        self._cells.store(self._tails[reader], tail + 1)
        packed = self._cells.read(self._records + RECORD * (tail % self._capacity), self._form.size)
        return self._form.unpack(packed)


class FirstReaderOnly(Ring):
    def push(self, record: Sequence[int | float]) -> bool:
        tails, self._tails = self._tails, self._tails[:1]
        try:
            return super().push(record)
        finally:
            self._tails = tails


class NumberFirst(Replies):
    def release(self, shard: int, number: int, version: int, dial: int = 0, flags: int = 0) -> None:
        self._cells.store(self._places[shard], number + 1)
        for word, value in enumerate((version, dial, flags), 1):
            self._cells.store(self._places[shard] + word, value)


class DialLast(Replies):
    def release(self, shard: int, number: int, version: int, dial: int = 0, flags: int = 0) -> None:
        super().release(shard, number, version, 0, flags)
        self._cells.store(self._places[shard] + 2, dial)


class OneShardIsEnough(Replies):
    def released(self, number: int) -> tuple[int, int, int] | None:
        places, self._places = self._places, self._places[:1]
        try:
            return super().released(number)
        finally:
            self._places = places


class FreeAtOnce(Drafts):
    def freed(self, slot: int, number: int) -> bool:
        places, self._places = self._places, self._places[:1]
        try:
            return super().freed(slot, number)
        finally:
            self._places = places


class OneRound(Shares):
    def tell(self, shard: int, number: int, values: Sequence[float]) -> None:
        self._cells.write(self._places[shard], struct.pack(f"{len(values)}d", *values))
        self._cells.write(self._places[shard] + LINE, struct.pack(f"{len(values)}d", *values))
        self._cells.store(self._counters[shard], number)


BROKEN = {
    "head before the record": ring_case(HeadFirst, capacity=1, readers=1, records=2),
    "tail before the record": ring_case(TailFirst, capacity=1, readers=1, records=2),
    "the slower reader overrun": ring_case(FirstReaderOnly, capacity=1, readers=2, records=2),
    "number before the version": replies_case(NumberFirst),
    "one shard is enough": replies_case(OneShardIsEnough),
    "the dial after the number": replies_case(DialLast),
    "a slot that one shard still reads": drafts_case(FreeAtOnce),
    "one round only": shares_case(OneRound),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_exchange_is_caught(what: str) -> None:
    case, words = BROKEN[what]
    with pytest.raises(AssertionError):
        explore(case, words)


# -- between processes -------------------------------------------------------------------------------------

WIDE = struct.Struct(f"={RECORD}q")
RECORDS, ROUNDS, CAPACITY = 20_000, 8, 16
WRITER = f"""
import os, struct, sys
from syncline.engines.local.exchange import Ring
from syncline.engines.local.shared_memory import SharedWords, Region

form = struct.Struct("={RECORD}q")
for fd in map(int, sys.argv[1:]):
    pid = os.fork()
    if pid == 0:
        ring = Ring(SharedWords(Region(8 * Ring.words({CAPACITY}), fd)), 0, capacity={CAPACITY}, form=form)
        for number in range({RECORDS}):
            while not ring.push([number * 7 + i for i in range({RECORD})]):
                os.sched_yield()
        os._exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def record_at(number: int) -> tuple[int, ...]:
    return tuple(number * 7 + i for i in range(RECORD))


def pop_all(ring: Ring, upto: int, first: int = 0) -> int:
    """Read up to that record, checking each; the number of the next one comes back."""
    while first < upto:
        record = ring.pop()
        if record is None:
            os.sched_yield()
            continue
        assert record == record_at(first)
        first += 1
    return first


def test_a_killed_writer_leaves_only_whole_records() -> None:
    """The first writer ends by itself, the others are killed at random moments."""
    regions = [Region(8 * Ring.words(CAPACITY)) for _ in range(ROUNDS)]
    fds = [region.fd for region in regions]
    command = [sys.executable, "-W", "ignore", "-c", WRITER, *map(str, fds)]
    with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdout is not None
        for index, region in enumerate(regions):
            pid = int(writers.stdout.readline())
            ring = Ring(SharedWords(region), 0, capacity=CAPACITY, form=WIDE)
            stop = random.randrange(RECORDS // 2) if index else RECORDS
            read = pop_all(ring, stop)
            if index:
                os.kill(pid, signal.SIGKILL)
            status = int(writers.stdout.readline())
            assert os.WIFSIGNALED(status) == bool(index)
            while (record := ring.pop()) is not None:  # what it had committed is there
                assert record == record_at(read)
                read += 1
            assert stop <= read <= stop + CAPACITY
    assert writers.returncode == 0

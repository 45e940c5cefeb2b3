"""The ring of versions (M13) over all interleavings of small cases: what is read is one version, whole, of all shards."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from syncline.engines.local.exchange import LINE, Words
from syncline.engines.local.version_reader import Reader
from syncline.ports import WRITTEN
from syncline.table.layout import Layout, lay_out
from tests.unit.engines.local.test_exchange import Case, Memory, Process, explore

PLACES = 2


class Unlooked(Words):
    """Broken: the words are not looked at again."""

    def lies(self, version: int, where: object) -> bool:
        return True


class WordFirst(Words):
    """Broken: a place is not taken back before it is written."""

    def offer(self, shard: int, place: int, version: int) -> None:
        if version != WRITTEN:
            super().offer(shard, place, version)


def words_case(kind: type[Words], *, versions: int) -> tuple[Case, int]:
    """A shard makes versions of two numbers in turn, beside each other; a reader tries a few times to copy one."""
    data = Words.words(1, PLACES)

    def case(memory: Memory) -> tuple[list[Process], Callable[[], None]]:
        words = kind(memory, 0, shards=1, places=PLACES)

        def write() -> None:
            for version in range(versions):
                place = version % PLACES
                words.offer(0, place, WRITTEN)
                memory.store(data + 2 * place, version + 10)
                memory.store(data + 2 * place + 1, version + 10)
                words.offer(0, place, version)

        def read() -> None:
            for _ in range(2):
                version, place = max(words.held(0).items())
                if version >= 0:
                    got = [memory.load(data + 2 * place), memory.load(data + 2 * place + 1)]
                    assert not words.lies(version, [(0, place)]) or got == [version + 10] * 2

        return [write, read], lambda: None

    return case, data + 2 * PLACES


def test_what_still_lies_there_after_it_was_copied_is_whole() -> None:
    assert explore(*words_case(Words, versions=4)).runs > 100


@pytest.mark.parametrize("kind", [Unlooked, WordFirst])
def test_a_ring_that_does_not_look_twice_is_caught(kind: type[Words]) -> None:
    with pytest.raises(AssertionError):
        explore(*words_case(kind, versions=4))


class Ring:
    """Two shards' parts of a table, one parameter of which is cut between them."""

    def __init__(self) -> None:
        model = nn.ParameterList([torch.zeros(6), torch.zeros(4000), torch.zeros(3)])
        self.layout: Layout
        self.layout, _ = lay_out(model, [model.parameters()], cuttable=True, shards=2)
        flat = self.layout.parameters
        new = lambda: flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))  # noqa: E731
        self.places = [new() for _ in range(3)]
        self.words = Words(Memory(Words.words(2, 3)), 0, shards=2, places=3)
        self.reader = Reader(self.layout, self.places, self.words, new())

    def make(self, shard: int, place: int, version: int) -> None:
        for segment in self.layout.parts[shard].segments(self.places[place]):
            segment.fill_(version)
        self.words.offer(shard, place, version)

    def read(self, released: int) -> int | None:
        found = self.reader.choose(released)
        if found is None:
            return None
        version, places = found
        assert all(torch.equal(each, torch.full_like(each, version)) for each in self.reader.sources(places))
        return version if self.reader.hold(version, places) else None


def test_the_released_version_is_read_wherever_its_parts_lie() -> None:
    ring = Ring()
    assert any(
        len({shard for shard, part in enumerate(ring.layout.parts) for p in part.pieces if p.entry == entry})
        > 1
        for entry in range(3)
    )
    ring.make(0, 0, 4), ring.make(1, 2, 4)
    ring.make(0, 1, 5), ring.make(1, 0, 5)
    assert ring.read(4) == 4 and ring.read(5) == 5


def test_who_is_overtaken_reads_the_newest_version_that_all_shards_have_or_none() -> None:
    ring = Ring()
    ring.make(0, 0, 5), ring.make(1, 0, 4)
    assert ring.read(4) is None  # one shard has made the next already in place, the other has not
    ring.make(1, 1, 5), ring.make(0, 1, 6)
    assert ring.read(3) == 5 and ring.read(6) is None
    ring.words.offer(0, 0, WRITTEN)
    assert ring.read(3) is None


def test_who_reads_some_elements_looks_only_at_shards_that_hold_them() -> None:
    ring = Ring()
    scratch = [torch.full_like(segment, -1.0) for segment in ring.places[0]]
    edge = next(piece.stop for piece in ring.layout.parts[0].pieces if piece.entry == 1)
    reads = [[(0, 6)], [(0, edge)], []]
    first = Reader(ring.layout, ring.places, ring.words, scratch, reads)
    ring.make(0, 1, 5), ring.make(1, 0, 4)
    version, places = first.choose(5) or (None, [])
    assert version == 5 and first.hold(5, places), "the other shard is behind, and not asked"
    own = first.sources(places)
    assert bool((own[0] == 5).all() and (own[1][:edge] == 5).all())
    ring.make(1, 2, 5)
    both = Reader(ring.layout, ring.places, ring.words, scratch, [[], [(edge - 1, edge + 1)], []])
    version, places = both.choose(5) or (None, [])
    assert places == [1, 2] and bool((both.sources(places)[1] == 5).all())


def test_shards_share_no_cache_line() -> None:
    memory = Memory(Words.words(2, 3))
    words = Words(memory, 0, shards=2, places=3)
    words.offer(0, 2, 7), words.offer(1, 0, 8)
    assert [cell for cell, word in enumerate(memory.words) if word] == [2, LINE]

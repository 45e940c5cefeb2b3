"""A shard (M3–M6): the weighted mean with its gaps, puts, kept versions, clipping over all shards."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syncline.dial import Sync
from syncline.ports import WRITTEN
from syncline.table.gradient_slot import Slot, SlotPart, private_slot
from syncline.table.layout import Layout, lay_out
from syncline.table.optimizer_template import OptimizerTemplate, merge, split
from syncline.table.shard import Shard, total_norm
from syncline.table.store import OwnMemory, copy_segments

SHAPES = ((5, 7), (), (3, 50), (0,), (130,), (64,))
SGD = partial(torch.optim.SGD, lr=1.0)


class Memory(OwnMemory):
    """Readers may be at work, if the test says so; what is being written is no number to them."""

    def __init__(self, layout: Layout, shard: int, places: int, first: Sequence[Tensor]) -> None:
        super().__init__(layout, shard, places)
        copy_segments(self.places[0], layout.parts[shard].segments(first))
        self.offered: dict[int, int] = {}
        self.readers = False

    def offer(self, place: int, version: int) -> None:
        self.offered = {each: where for each, where in self.offered.items() if where != place}
        if version != WRITTEN:
            self.offered[version] = place

    def being_read(self) -> bool:
        return self.readers


class Table:
    """All shards of one table in one process, with slots as learners fill them."""

    def __init__(
        self,
        shards: int,
        *,
        factory: partial[torch.optim.Optimizer] = SGD,
        lockstep: bool = False,
        kept: int = 0,
        clip_norm: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.model = nn.Module()
        self.model.all = nn.ParameterList(torch.randn(s, generator=drawn).to(dtype) for s in SHAPES)
        self.plain = factory(self.model.parameters())
        template = OptimizerTemplate.of(self.plain)
        self.options = template.options
        self.layout: Layout
        self.layout, _ = lay_out(
            self.model, [self.model.parameters()], cuttable=template.cuttable, shards=shards
        )
        flat = self.layout.parameters
        first = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
        self.fill_views(first, list(self.model.parameters()))
        self.memories = [Memory(self.layout, index, 1 + kept, first) for index in range(shards)]
        self.slots: dict[tuple[int, int], tuple[Slot, list[SlotPart]]] = {}
        self.shards = [
            Shard(
                self.layout,
                index,
                template,
                self.memories[index],
                sync=Sync(one_from_each=True, lead=max(0, kept - 1)) if lockstep else Sync(splits=1),
                clip_norm=clip_norm,
            )
            for index in range(shards)
        ]

    def fill_views(self, segments: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
        for view, value in zip(self.layout.parameters.views(segments), values, strict=True):
            view.copy_(value.detach()) if value is not None else view.fill_(
                float("nan")
            )  # left over from before

    def slot(self, gradients: Sequence[Tensor | None], key: tuple[int, int] = (0, 0)) -> Slot:
        """Filled as a learner does; each has its slots and uses them again."""
        if key not in self.slots:
            slot = private_slot(self.layout)
            self.slots[key] = slot, [slot.part(shard.part) for shard in self.shards]
        slot, _ = self.slots[key]
        self.fill_views(slot.segments, gradients)
        slot.mask.copy_(torch.tensor([gradient is not None for gradient in gradients]))
        return slot

    def take(
        self,
        gradients: Sequence[Tensor | None],
        count: int = 1,
        rank: int = 0,
        iteration: int = 0,
        alone: bool = False,
        damping: float = 1.0,
    ) -> None:
        key, full = (rank, iteration % 2), None not in gradients
        self.slot(gradients, key)
        for shard, part in zip(self.shards, self.slots[key][1], strict=True):
            shard.take(
                part,
                full=full,
                count=count,
                rank=rank,
                iteration=iteration,
                alone=alone,
                damping=damping,
            )

    def fold(self, iteration: int = 0, factor: float = 1.0) -> None:
        for shard in self.shards:
            shard.gather(iteration)
        if self.shards[0].clip_norm is not None and len(self.shards) > 1:
            total = total_norm(self.layout, [shard.norms() for shard in self.shards])
            for shard in self.shards:
                shard.clip(total)
        for shard in self.shards:
            shard.apply(self.options, factor)

    def values(self) -> list[Tensor]:
        """Of the newest version."""
        return self.read(self.shards[0].version)

    def read(self, version: int) -> list[Tensor]:
        flat = self.layout.parameters
        into = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
        for shard in self.shards:
            shard.read(version, into)
        return flat.views(into)


def drawn(seed: int, without: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1000 + seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [None if index in without else value for index, value in enumerate(made)]


def weighted_mean(taken: Sequence[tuple[list[Tensor | None], int]]) -> list[Tensor | None]:
    """In float64; missing in some counts as zero there, missing in all is None."""
    total, means = sum(count for _, count in taken), []
    for column in zip(*(gradients for gradients, _ in taken), strict=True):
        present = [(g.double(), n) for g, (_, n) in zip(column, taken, strict=True) if g is not None and n]
        means.append(sum(g * n for g, n in present) / total if present else None)
    return means


def assert_close(
    table: Table,
    before: list[Tensor],
    mean: Sequence[Tensor | None],
    rtol: float = 1e-5,
    decay: float = 0.0,
) -> None:
    for value, old, step in zip(table.values(), before, mean, strict=True):
        if step is None:
            assert torch.equal(value, old)
        else:
            expected = (old.double() * (1 - decay) - step).to(value.dtype)
            torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol)


gradients = st.lists(
    st.tuples(st.integers(0, 99), st.sets(st.integers(0, len(SHAPES) - 1)), st.sampled_from([0, 1, 3, 32])),
    min_size=1,
    max_size=5,
).filter(lambda made: sum(count for _, _, count in made) > 0)
Made = list[tuple[int, set[int], int]]
many = settings(max_examples=60, deadline=None)


@many
@given(st.lists(gradients, min_size=2, max_size=3), st.booleans(), st.integers(1, 4), st.booleans())
def test_a_fold_is_the_mean_weighted_by_examples(
    folds: list[Made], lockstep: bool, shards: int, full: bool
) -> None:
    """M3: gaps count as zero, weight 0 abstains, missing in all is skipped (no weight decay either)."""
    decay = 0.5
    table = Table(shards, factory=partial(torch.optim.SGD, lr=1.0, weight_decay=decay), lockstep=lockstep)
    for made in folds:  # later folds find the gradients of earlier ones in place
        before = table.values()
        taken = [(drawn(seed, () if full else list(without)), count) for seed, without, count in made]
        for rank, (values, count) in enumerate(taken):
            table.take(values, count, rank)
        table.fold()
        assert_close(table, before, weighted_mean(taken), decay=decay)
    assert [shard.version for shard in table.shards] == [len(folds)] * shards


@many
@given(
    gradients,
    st.lists(st.sampled_from([1.0, 0.5, 1 / 3, 0.01]), min_size=5, max_size=5),
    st.integers(1, 3),
    st.booleans(),
)
def test_damping_multiplies_each_gradient_and_not_its_part_of_the_mean(
    made: Made, dampings: list[float], shards: int, full: bool
) -> None:
    """M4: Σ nᵢ·wᵢ·gᵢ / Σ nᵢ, so that a fold of stale gradients is a small step."""
    table = Table(shards, factory=partial(torch.optim.SGD, lr=1.0, weight_decay=0.5))
    taken = [(drawn(seed, () if full else list(without)), count) for seed, without, count in made]
    for _ in range(2):  # the second fold finds the running mean of the first
        before = table.values()
        for rank, (values, count) in enumerate(taken):
            table.take(values, count, rank, alone=len(taken) == 1, damping=dampings[rank])
        table.fold()
        damped = [
            ([None if value is None else value * damping for value in values], count)
            for (values, count), damping in zip(taken, dampings, strict=False)
        ]
        assert_close(table, before, weighted_mean(damped), decay=0.5)


def test_a_damped_gradient_alone_leaves_its_slot_as_it_was() -> None:
    table = Table(1)
    values = drawn(3)
    table.take(values, alone=True, damping=0.25)
    table.fold()
    for kept, value in zip(table.layout.parameters.views(table.slots[0, 0][0].segments), values, strict=True):
        assert value is not None and torch.equal(kept, value)


def test_the_dial_of_a_shard_may_change_between_two_folds() -> None:
    """Every version that lockstep learners read from here on is kept; before that, only the newest is."""
    table = Table(2, kept=3)
    free, delayed, hard = (Sync.parse(text) for text in ("softsync:1", "delayed:2", "hardsync"))
    versions, present, base = [table.values()], None, 0
    for fold, sync in enumerate([free, free, delayed, delayed, delayed, delayed, hard, delayed, free]):
        if sync is not present:
            present, base = sync, fold
            for shard in table.shards:
                shard.change(sync)
        for rank in (1, 0):
            table.take(drawn(fold + rank), rank=rank, iteration=fold if sync.lockstep else 0)
        table.fold(fold if sync.lockstep else 0)
        mean = weighted_mean([(drawn(fold + rank), 1) for rank in (0, 1)])
        assert_close(table, versions[-1], mean)
        versions.append(table.values())
        for version in range(max(base, fold + 1 - sync.delay), fold + 2):
            assert all(torch.equal(a, b) for a, b in zip(table.read(version), versions[version], strict=True))


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("lockstep", [False, True])
def test_other_dtypes_fold_to_their_rounding(dtype: torch.dtype, rtol: float, lockstep: bool) -> None:
    table = Table(3, lockstep=lockstep, dtype=dtype)
    taken = [(drawn(seed, dtype=dtype), 3 + seed) for seed in range(4)]
    before = table.values()
    for rank, (values, count) in enumerate(taken):
        table.take(values, count, rank)
    table.fold()
    assert_close(table, before, weighted_mean(taken), rtol)


def test_lockstep_sums_in_rank_order_whatever_the_order_of_arrival() -> None:
    """M3: repeatable bits."""
    found = []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        table = Table(2, lockstep=True)
        for rank in order:
            table.take(drawn(rank), 1 + rank, rank)
        table.fold()
        found.append(table.values())
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_lockstep_keeps_iterations_apart() -> None:
    table = Table(2, lockstep=True)
    before = table.values()
    table.take(drawn(1), rank=1, iteration=1)  # ahead by one
    table.take(drawn(0), rank=1, iteration=0)
    table.take(drawn(2), rank=0, iteration=0)
    table.fold(iteration=0)
    assert_close(table, before, weighted_mean([(drawn(0), 1), (drawn(2), 1)]))
    before = table.values()
    table.fold(iteration=1)
    assert_close(table, before, drawn(1))


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_one_gradient_gives_the_bits_of_plain_pytorch(lockstep: bool, shards: int) -> None:
    """M2: no copy, no arithmetic on the way to the optimizer."""
    factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    table = Table(shards, factory=factory, lockstep=lockstep)
    for step in range(4):
        without = (2,) if step in (0, 2) else ()
        values = drawn(step, without)
        for parameter, value in zip(table.model.parameters(), values, strict=True):
            parameter.grad = value
        table.plain.step()
        table.take(values, 5, iteration=step, alone=step != 3)
        table.fold(iteration=step)
        for parameter, value in zip(table.model.parameters(), table.values(), strict=True):
            assert torch.equal(parameter, value)


def test_a_parameter_without_any_gradient_has_no_state_either() -> None:
    table = Table(2, factory=partial(torch.optim.Adam, lr=0.1))
    before = table.values()
    table.take(drawn(0, (2, 4))), table.take(drawn(1, (2, 4)))
    table.fold()
    assert [torch.equal(a, b) for a, b in zip(table.values(), before, strict=True)] == [
        index in (2, 3, 4) for index in range(len(SHAPES))
    ]
    merged = merge(table.layout, table.options, [shard.state()[1] for shard in table.shards])
    assert sorted(merged["state"]) == [0, 1, 3, 5]


@pytest.mark.parametrize("lockstep", [False, True])
def test_who_abstains_brings_no_gradient_for_what_the_others_lack(lockstep: bool) -> None:
    table = Table(2, factory=partial(torch.optim.SGD, lr=1.0, weight_decay=0.5), lockstep=lockstep)
    before = table.values()
    table.take(drawn(0, (2,)), 4, rank=0), table.take(drawn(1), 0, rank=1)
    table.fold()
    assert_close(table, before, drawn(0, (2,)), decay=0.5)


def test_if_all_abstain_the_first_counts_as_it_is() -> None:
    table = Table(1, lockstep=True)
    before = table.values()
    table.take(drawn(1), 0, rank=1), table.take(drawn(0), 0, rank=0)
    table.fold()
    assert_close(table, before, drawn(0))


# -- rates, puts, versions (M4, M6, M2) --------------------------------------------------------------------


def test_the_factor_multiplies_the_rate_of_one_fold_only() -> None:
    table = Table(2)
    for factor in (0.25, 1.0):
        before = table.values()
        table.take(drawn(0), alone=True)
        table.fold(factor=factor)
        assert_close(table, before, [factor * value for value in drawn(0) if value is not None])
    assert [shard.state()[0][0]["lr"] for shard in table.shards] == [1.0, 1.0]


def test_options_that_come_with_a_gradient_hold_for_its_fold() -> None:
    table = Table(2)
    table.options = [{**table.options[0], "lr": 0.5}]
    before = table.values()
    table.take(drawn(0), alone=True)
    table.fold()
    assert_close(table, before, [0.5 * value for value in drawn(0) if value is not None])


def test_a_put_replaces_the_weights_at_the_next_fold_and_the_lowest_rank_wins() -> None:
    table = Table(2)
    before = table.values()
    for rank in (3, 1, 2):
        slot = table.slot(drawn(50 + rank))
        for shard in table.shards:
            shard.put(rank, slot.part(shard.part).segments)
        table.fill_views(slot.segments, drawn(0))  # the slot is free again at once
    assert all(torch.equal(a, b) for a, b in zip(table.values(), before, strict=True))
    table.take(drawn(0), alone=True)
    table.fold()
    put = [value for value in drawn(51) if value is not None]
    assert_close(table, put, drawn(0))
    before = table.values()
    table.take(drawn(2), alone=True)
    table.fold()
    assert_close(table, before, drawn(2))  # once


def test_a_put_without_a_later_fold_counts_at_the_end() -> None:
    table = Table(2)
    slot = table.slot(drawn(7))
    for shard in table.shards:
        shard.put(0, slot.part(shard.part).segments)
        shard.settle()
    assert_close(table, [torch.zeros(shape) for shape in SHAPES], [-v for v in drawn(7) if v is not None])


@pytest.mark.parametrize("delay", [1, 3])
def test_delayed_learners_find_the_versions_they_read(delay: int) -> None:
    table = Table(2, lockstep=True, kept=delay + 1)
    versions = [table.values()]
    assert all(torch.equal(a, b) for a, b in zip(table.read(0), versions[0], strict=True))
    for iteration in range(6):
        table.take(drawn(iteration), iteration=iteration)
        table.fold(iteration)
        versions.append(table.values())
        for version in range(max(0, iteration + 1 - delay), iteration + 2):
            assert all(torch.equal(a, b) for a, b in zip(table.read(version), versions[version], strict=True))


class Holding(torch.optim.SGD):
    """Somebody's own, which holds the weights beside its parameters."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = self.__dict__.setdefault(
            "held", [p.data for group in self.param_groups for p in group["params"]]
        )
        for group in self.param_groups:
            for parameter, weights in zip(group["params"], held, strict=True):
                if parameter.grad is not None:
                    weights.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("factory", [SGD, partial(torch.optim.AdamW, lr=0.1), partial(Holding, lr=1.0)])
def test_a_step_is_made_in_place_unless_somebody_may_read_and_has_the_same_bits(
    factory: partial[torch.optim.Optimizer],
) -> None:
    alone, read = Table(2, factory=factory, kept=2), Table(2, factory=factory, kept=2)
    draw = random.Random(3)
    for fold in range(12):
        before, held = read.values(), [dict(memory.offered) for memory in read.memories]
        reading = draw.random() < 0.7
        for memory in read.memories:
            memory.readers = reading
        for table in (alone, read):
            table.take(drawn(fold), alone=True)
            table.fold()
        assert all(torch.equal(a, b) for a, b in zip(alone.values(), read.values(), strict=True))
        assert all(set(memory.offered) == {fold + 1} for memory in alone.memories)
        for memory, offered in zip(read.memories, held, strict=True):
            assert (fold in memory.offered) == reading
            if reading and factory.func is not Holding:
                assert memory.offered[fold] == offered[fold]  # it lies where its readers look
        if reading:
            assert all(torch.equal(a, b) for a, b in zip(read.read(fold), before, strict=True))


def test_without_kept_versions_the_newest_is_read_and_a_snapshot_is_a_copy() -> None:
    table = Table(2)
    snapshots = [shard.snapshot() for shard in table.shards]
    before = table.values()
    table.take(drawn(0), alone=True)
    table.fold()
    assert all(torch.equal(a, b) for a, b in zip(table.read(1), table.values(), strict=True))
    whole = [torch.cat(parts) for parts in zip(*snapshots, strict=True)]
    views = table.layout.parameters.views(whole)
    assert all(torch.equal(a, b) for a, b in zip(views, before, strict=True))


def test_a_loaded_state_goes_on() -> None:
    factory = partial(torch.optim.Adam, lr=0.1)
    one, three = Table(1, factory=factory), Table(3, factory=factory)
    for table in (one, three):
        table.take(drawn(0), alone=True)
        table.fold()
    one.take(drawn(1), alone=True)
    one.fold()
    merged = merge(one.layout, one.options, [shard.state()[1] for shard in one.shards])
    options, state = split(three.layout, merged)
    for shard in three.shards:
        shard.load(options, state)
    slot = three.slot(one.values())
    for shard in three.shards:
        shard.put(0, slot.part(shard.part).segments)
        shard.settle()
    for table in (one, three):
        table.take(drawn(2), alone=True)
        table.fold()
    assert all(torch.equal(a, b) for a, b in zip(one.values(), three.values(), strict=True))


def test_a_loaded_state_replaces_all_of_the_old_one() -> None:
    table = Table(2, factory=partial(torch.optim.SGD, lr=1.0, momentum=0.9))
    table.take(drawn(0), alone=True)
    table.fold()
    for shard in table.shards:
        shard.load(table.options, {})
    before = table.values()
    table.take(drawn(1), alone=True)
    table.fold()
    assert_close(table, before, drawn(1))  # without the momentum of before


# -- clipping (M5) -----------------------------------------------------------------------------------------


@many
@given(st.integers(1, 5), st.integers(0, 99), st.sets(st.integers(0, 5), max_size=5), st.floats(0.01, 50))
def test_clipping_over_all_shards_is_clipping_of_the_whole(
    shards: int, seed: int, without: set[int], most: float
) -> None:
    table = Table(shards, clip_norm=most)
    values = drawn(seed, list(without))
    before = table.values()
    table.take(values, alone=True)
    table.fold()
    parameters = [nn.Parameter(old) for old in before]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = None if value is None else value.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, most)
    assert_close(table, before, [p.grad.double() if p.grad is not None else None for p in parameters])
    assert total_norm(table.layout, [s.norms() for s in table.shards]).item() == pytest.approx(
        min(norm.item(), most), rel=1e-4
    )


def test_one_shard_alone_clips_with_the_bits_of_pytorch() -> None:
    table = Table(1, clip_norm=0.5)
    table.take(drawn(0), alone=True)
    table.shards[0].gather(0)
    parameters = [nn.Parameter(value) for value in table.values()]
    for parameter, value in zip(parameters, drawn(0), strict=True):
        parameter.grad = value
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    for a, b in zip(table.shards[0].parameters, parameters, strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_a_shard_that_owns_nothing_takes_part() -> None:
    """More shards than there is to share out."""
    model = nn.Linear(2, 1, bias=False)
    template = OptimizerTemplate.of(SGD(model.parameters()))
    layout, _ = lay_out(model, [model.parameters()], cuttable=True, shards=3)
    memories = [OwnMemory(layout, index, 1) for index in range(3)]
    shards = [
        Shard(layout, index, template, memory, sync=Sync.parse("hardsync"), clip_norm=1.0)
        for index, memory in enumerate(memories)
    ]
    assert sorted(len(shard.part.pieces) for shard in shards) == [0, 0, 1]
    slot = private_slot(layout)
    slot.segments[0].fill_(1.0)
    for shard in shards:
        shard.take(slot.part(shard.part), full=True, count=1, rank=0, iteration=0, alone=True)
        shard.gather(0)
    total = total_norm(layout, [shard.norms() for shard in shards])
    for shard in shards:
        shard.clip(total)
        shard.apply(template.options, 1.0)
    expected = torch.full((1, 2), -(0.5**0.5))
    into = layout.parameters.segments(torch.zeros(layout.parameters.nbytes, dtype=torch.uint8))
    for shard in shards:
        shard.read(1, into)
    torch.testing.assert_close(layout.parameters.views(into)[0], expected)

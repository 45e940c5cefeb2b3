"""A shard: its part of one table, of what accumulates gradients, what updates, what stores versions (M3, M4, M5, M13).

Not responsible for deciding when to fold, nor for who reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.dial import Sync
from syncline.table.accumulator import Accumulator, Taken
from syncline.table.checkpoints import piece_tensors
from syncline.table.layout import Layout
from syncline.table.optimizer_template import OptimizerTemplate, Options, PieceState
from syncline.table.store import Store, copy_segments
from syncline.table.updater import Updater
from syncline.table.version_memory import VersionMemory


class Shard:
    """One shard of one table; the memory's first place holds the version that it begins with."""

    def __init__(
        self,
        layout: Layout,
        index: int,
        template: OptimizerTemplate,
        memory: VersionMemory,
        *,
        sync: Sync,
        clip_norm: float | None = None,
        version: int = 0,
    ) -> None:
        self.layout, self.part = layout, layout.parts[index]
        first = memory.places[0]
        self._updater = Updater(layout, self.part, template, first, clip_norm)
        self._store = Store(memory, version, movable=self._updater.movable)
        self._accumulator = Accumulator(layout, self.part, first)
        self._one: Taken | None = None  # the only gradient of the next step, which may wait
        self._put: dict[int, list[Tensor]] = {}
        self.clip_norm = clip_norm
        self.norms, self.clip = self._updater.norms, self._updater.clip
        self.clip_alone = self._updater.clip_alone
        self.take = self._accumulator.take
        self.change(sync)

    @property
    def version(self) -> int:
        return self._store.version

    @property
    def parameters(self) -> Sequence[Tensor]:
        return self._updater.parameters

    @property
    def weights(self) -> list[Tensor]:
        """Of the newest version."""
        self._settle()
        return self._store.segments

    def _settle(self) -> None:
        """Steps that wait are made first."""
        if (maker := self._accumulator.maker) is not None:
            maker.settle()

    def change(self, sync: Sync) -> None:
        """Another dial; nothing that was taken waits for its fold."""
        self._settle()
        self._accumulator.change(lockstep=sync.lockstep)
        self._store.keep(sync.delay > 0)
        self._steps_wait = (
            not sync.lockstep
            and not sync.delay
            and self.clip_norm is None
            and self.layout.shards == 1
            and self._updater.fits_flat
        )

    # -- folding -----------------------------------------------------------------------------------------

    def gather(self, iteration: int) -> int:
        """The mean of what the fold takes is the gradient of the next step; how many were added up only now."""
        maker = self._accumulator.maker
        if self._steps_wait and maker is not None and maker.waits:
            self._one = self._accumulator.alone()
            if self._one is not None:
                return 0
        gathered = self._accumulator.gather(iteration)
        self._updater.gather(gathered)
        return gathered.added

    def apply(self, options: Options, factor: float) -> None:
        """Run the optimizer on the gathered gradient: the next version."""
        self._updater.follow(options, factor)
        one, self._one = self._one, None
        if one is None or self._put or not self._step_later(one):
            if one is not None:
                self._updater.gather(self._accumulator.made([one]))
            self._step_now()
        self._store.complete()

    def _step_later(self, taken: Taken) -> bool:
        """The step waits until somebody needs what it makes."""
        maker = self._accumulator.maker
        assert maker is not None
        steps = self._updater.flat()
        plan = steps.plan(self._updater.parameters)
        return plan is not None and maker.step_later(taken.promise, steps, plan, self.version + 1)

    def _step_now(self) -> None:
        self._settle()
        store = self._store
        before = store.segments
        store.prepare()
        if store.segments is not before:
            self._updater.rebind(store.segments)
        if self._put:
            copy_segments(store.segments, self._put[min(self._put)])
            self._put.clear()
        self._updater.step()

    # -- reading and writing -----------------------------------------------------------------------------

    def read(self, version: int, into: Sequence[Tensor]) -> None:
        """Copy the shard's part of one version, into segments of the whole table."""
        self._settle()
        copy_segments(self.part.segments(into), self._store.of(version))

    def put(self, rank: int, values: Sequence[Tensor]) -> None:
        """Values that replace the weights with the next fold; the lowest rank's win (M6)."""
        self._put[rank] = [value.clone() for value in values]

    def settle(self) -> None:
        """The end of the run: what was put without a later fold counts too."""
        self._settle()
        if self._put:
            self._store.fill(self._put[min(self._put)])
            self._put.clear()

    def snapshot(self) -> list[Tensor]:
        return [segment.clone().cpu() for segment in self.weights]

    def begin(self, values: Sequence[Tensor]) -> None:
        """The values to begin with."""
        self._store.fill(values)

    def first(self) -> dict[str, Tensor]:
        """The weights to begin with, by name; not copied."""
        pieces = self.part.views(self.weights, self.layout.parameters.entries)
        return piece_tensors(self.part, pieces, {})[0]

    def cut(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Weights and optimizer state as they are now, by name; the copies are good until the next cut."""
        self._settle()
        return self._updater.cut()

    def state(self) -> tuple[Options, PieceState]:
        self._settle()
        return self._updater.state()

    def own_options(self) -> Options:
        """Of the groups, what the optimizer itself has changed."""
        return self._updater.own_options()

    def whole_state(self) -> dict[str, Any] | None:
        """Of an optimizer that holds others, or has state of no parameter."""
        return self._updater.whole_state()

    def load(
        self, options: Options, state: dict[int, dict[str, Any]], whole: dict[str, Any] | None = None
    ) -> None:
        """Replace the optimizer's state; `whole` as `whole_state` gives it, in place of the others."""
        self._settle()
        if whole is not None:
            self._updater.load_whole(whole)
        else:
            self._updater.load(options, state)


def total_norm(layout: Layout, norms: Sequence[Tensor]) -> Tensor:
    """Norm over all shards from the norms of their pieces; cut entries are put together first."""
    by_entry: dict[int, list[Tensor]] = {}
    for part, values in zip(layout.parts, norms, strict=True):
        for piece, value in zip(part.pieces, values, strict=True):
            by_entry.setdefault(piece.entry, []).append(value)
    entries = [torch.linalg.vector_norm(torch.stack(values)) for _, values in sorted(by_entry.items())]
    return torch.linalg.vector_norm(torch.stack(entries))

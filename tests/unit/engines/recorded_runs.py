"""A recorder whose clock is set, and whose evaluations, stops and listeners' records are noted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from syncline.dial import Course
from syncline.engines.recorder import Recorder
from syncline.engines.run import RunSpec, Storage, Task
from syncline.messages import EpochEnd, WeightsPart
from syncline.protocols.lifecycle import Faults
from syncline.roles.checkpoint_manifest import Restored
from syncline.roles.run_plan import RunPlan
from syncline.table.layout import lay_out

SHARDS = 2
LAYOUT, _ = lay_out(model := nn.Linear(70, 2), [model.parameters()], cuttable=True, shards=SHARDS)


def spec_of(
    *, restored: Restored | None = None, learners: int = 2, faults: Faults | None = None, **changes: Any
) -> RunSpec:
    plan = RunPlan(course=Course.of("softsync:1"), learners=learners)
    storage = replace(changes.pop("storage", Storage()), restored=restored)
    return RunSpec(task=Task(print), plan=plan, storage=storage, faults=faults or Faults(), **changes)


class NotedRun:
    """`evaluations` are those asked for, `heard` is what listeners got."""

    def __init__(self, spec: RunSpec | None = None, *, listens: bool = True) -> None:
        self.clock = 0.0
        self.evaluations: list[tuple[int, dict[str, Tensor]]] = []
        self.stops = 0
        self.heard: list[Any] = []
        spec = spec or spec_of()
        self.spec = replace(spec, listeners=(*spec.listeners, *([self.heard.append] if listens else [])))
        self.recorder = Recorder(
            self.spec,
            now=lambda: self.clock,
            evaluate=lambda epoch, state: self.evaluations.append((epoch, state)),
            stop=self._stop,
            layouts=lambda: {0: LAYOUT},
        )

    def _stop(self) -> None:
        self.stops += 1

    def told(self, kind: type) -> list[Any]:
        return [each for each in self.heard if isinstance(each, kind)]

    def epoch(self, number: int, *, tables: int = 1, loader: int = 0) -> None:
        """It ends at version 10·(number + 1)."""
        end = EpochEnd(loader, number, 10 * (number + 1), 8, 0.5, {0: 0.5}, tables=tables, done=number + 1)
        self.recorder.emit(end)

    def part(self, tag: str, shard: int, value: float = 0.0, own: Any = ()) -> None:
        """All of its parameters have this value."""
        flat = LAYOUT.parameters
        segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
        for view in flat.views(segments):
            view.fill_(value)
        mine = LAYOUT.parts[shard].segments(segments)
        self.recorder.emit(WeightsPart(tag, 0, shard, 7, mine, own=list(own)))

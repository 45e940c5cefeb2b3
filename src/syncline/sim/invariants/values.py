"""Weights of one table as they must be: a plain fold beside the shards' own (M3, M4), kept for the last versions.

Checks what each shard makes of an update, that all shards carry out one log, and that readers get one version of all
of them. Folds are recomputed for plain SGD; under other optimizers the shards' own results stand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.messages import log
from syncline.protocols.sequence import Fold
from syncline.sim.invariants.loader_accounts import Broken
from syncline.table.layout import Layout
from syncline.table.optimizer_template import OptimizerTemplate, Options
from syncline.table.shard import Shard

KEPT = 64  # versions, at least
TOLERANCE = 1e-4

Key = tuple[int, int]


class Values:
    """Gradients, weights and logs of one table."""

    def __init__(
        self,
        layout: Layout,
        template: OptimizerTemplate,
        weights: Sequence[Tensor],
        version: int,
        clip: bool,
        readable: int = 0,
    ) -> None:
        """Follow a table from this version on; shards keep that many versions `readable`."""
        self.layout = layout
        one = template.kind is torch.optim.SGD and len(template.options) == 1
        more = ("momentum", "weight_decay", "nesterov", "maximize")  # a plain step is lr times the mean
        self.plain = one and not clip and not any(template.options[0].get(name) for name in more)
        self._newest = self._oldest = self.version = version
        self._kept = max(KEPT, readable)
        self._weights = {version: [segment.clone() for segment in weights]}
        self._made = {version: set(range(layout.shards))}  # version -> shards that have it
        self._gradients: dict[Key, list[Tensor]] = {}
        # of each, what others had first
        self._log: list[deque[log.Entry]] = [deque() for _ in range(layout.shards)]
        self._ahead = 0  # entries that some shard has carried out
        self._done = [0] * layout.shards
        self._put = False  # weights were overwritten: the next update is not what it was computed to be

    def published(
        self, learner: int, number: int, gradients: Sequence[Tensor], present: Sequence[bool]
    ) -> None:
        """A copy of what lies in the slot."""
        if self.plain:
            flat = self.layout.parameters
            copies = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
            for view, value, has in zip(flat.views(copies), gradients, present, strict=True):
                if has:
                    view.copy_(value)
            self._gradients[learner, number] = copies

    def forget(self, learner: int, number: int) -> None:
        self._gradients.pop((learner, number), None)

    def folded(self, fold: Fold, weights: Sequence[int], options: Options) -> None:
        """Compute the next version from its gradients and the weight of each in their mean.

        The account of the table has checked the fold's factor and weights.
        """
        before = self._weights[self._newest]
        after = [segment.clone() for segment in before]
        if self.plain and not self._put:
            rate = float(options[0]["lr"]) * fold.factor
            for ticket, weight in zip(fold.tickets, weights, strict=True):
                share = rate * weight * ticket.weight / sum(weights)
                for mine, theirs in zip(after, self._gradients[ticket.learner, ticket.number], strict=True):
                    mine -= share * theirs
        for ticket in fold.tickets:
            self.forget(ticket.learner, ticket.number)
        self._newest = fold.version
        self._weights[fold.version], self._made[fold.version] = after, set()
        while self._oldest <= fold.version - self._kept and self._made_by_all(self._oldest):
            del self._weights[self._oldest], self._made[self._oldest]
            self._oldest += 1

    # -- shards ------------------------------------------------------------------------------------------

    def carried_out(self, index: int, entry: log.Entry, shard: Shard) -> None:
        """By this shard: all carry out the same, whoever comes first."""
        if self._done[index] == self._ahead:
            self._ahead += 1
            for other, behind in enumerate(self._log):
                if other != index:
                    behind.append(entry)
        elif (expected := self._log[index].popleft()) != entry or type(expected) is not type(entry):
            raise Broken(f"shard {index} carries out {entry}, another one {expected}")
        self._done[index] += 1
        if isinstance(entry, log.PutValues):
            self._put = True
        if not isinstance(entry, log.Fold):
            return
        version = entry.version
        if shard.version != version:
            raise Broken(f"shard {index} is at version {shard.version}, the log at {version}")
        whole = shard.part.segments(self._weights[version])
        for mine, theirs in zip(whole, shard.weights, strict=True):
            compared = self.plain and not self._put
            if compared and not torch.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE):
                off = float((mine - theirs).abs().max())
                raise Broken(
                    f"shard {index} made version {version} {off:g} away from the mean of its gradients"
                )
            mine.copy_(theirs)
        self._made[version].add(index)
        if self._made_by_all(version):
            self._put = False

    def _made_by_all(self, version: int) -> bool:
        return len(self._made[version]) == self.layout.shards

    def read(self, learner: int, version: int, weights: Sequence[Tensor]) -> None:
        """What a learner takes over must be this version, whole."""
        if version not in self._weights:
            return
        missing = set(range(self.layout.shards)) - self._made[version]
        if missing:
            raise Broken(
                f"learner {learner} reads version {version}, which shards {sorted(missing)} have not made"
            )
        known = self.layout.parameters.views(self._weights[version])
        for index, (mine, theirs) in enumerate(zip(known, weights, strict=True)):
            if not torch.equal(mine, theirs):
                raise Broken(
                    f"learner {learner} reads parameter {index} of version {version}, and gets other weights"
                )

    def over(self) -> None:
        for index, left in enumerate(self._log):
            if left:
                raise Broken(f"shard {index} never carried out {left[0]} and {len(left) - 1} more")

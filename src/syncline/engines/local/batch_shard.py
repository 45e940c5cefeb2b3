"""A shard's process under a batch method: named vectors, the commands on them, and their files.

Not responsible for which commands: the coordinator sends them.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from syncline import messages as m
from syncline.batch import messages as b
from syncline.engines.checkpoint_writer import Job, write_part
from syncline.engines.local.control_channel import Channel, Closed
from syncline.engines.local.shared_memory import Region, crash_point
from syncline.roles.checkpoint_manifest import table_file
from syncline.table.checkpoints import Folder
from syncline.table.layout import Layout
from syncline.table.vectors import Vectors, read_vectors, vector_tensors


@dataclass(frozen=True, slots=True)
class BatchShardSpec:
    """A shard's own part of its setup."""

    shard: int
    layout: Layout
    names: tuple[str, ...]  # of vectors
    point: Region
    pools: list[Region]
    beat: Region  # its first word counts messages
    folder: str | None = None  # of checkpoints
    restored: tuple[str, list[str]] | None = None  # a checkpoint to go on from, and its files


@dataclass(frozen=True, slots=True)
class Pool:
    """More slots, to shards and learners."""

    region: Region


class BatchMemory:
    """Slots by number, over regions that may become more."""

    def __init__(self, layout: Layout, regions: list[Region]) -> None:
        self._flat = layout.parameters
        self._slots: list[list[Tensor]] = []
        for region in regions:
            self.extend(region)

    def extend(self, region: Region) -> None:
        memory, size = region.tensor(), slot_bytes(self._flat.nbytes)
        for low in range(0, len(memory) - size + 1, size):
            self._slots.append(self._flat.segments(memory[low : low + size]))
        region.close()

    def __getitem__(self, slot: int) -> list[Tensor]:
        return self._slots[slot]


def slot_bytes(nbytes: int) -> int:
    """Of one slot: whole pages, so that a region holds just as many as were asked for."""
    return max(4096, -(-nbytes // 4096) * 4096)


class _Shard:
    def __init__(self, channel: Channel, spec: BatchShardSpec) -> None:
        self._channel, self._spec = channel, spec
        self._part = spec.layout.parts[spec.shard]
        x = self._part.segments(spec.layout.parameters.segments(spec.point.tensor()))
        self._vectors = Vectors(spec.names, x)
        self._slots = BatchMemory(spec.layout, spec.pools)
        if spec.restored is not None:
            folder, files = spec.restored
            read_vectors(Path(folder), files, spec.layout, spec.shard, self._vectors)
        channel.send(b.Ready())

    def hear(self, message: Any) -> None:
        self._spec.beat.words[0] += 1
        if isinstance(message, b.Run):
            measured = self._vectors.run(message.commands, crash_point)
            self._channel.send(b.Ran(self._spec.shard, message.number, measured))
        elif isinstance(message, b.Add):
            crash_point()
            values = self._part.segments(self._slots[message.slot])
            self._vectors.add(message.to, values, first=message.first)
            self._channel.send(b.Added(self._spec.shard, message.slot))
        elif isinstance(message, b.Save):
            crash_point()
            self._save(message.number)
        elif isinstance(message, Pool):
            self._slots.extend(message.region)

    def _save(self, number: int) -> None:
        """At once: the vectors of the next iteration are others."""
        assert self._spec.folder is not None
        tensors = vector_tensors(self._spec.layout, self._spec.shard, self._vectors)
        job: Job = (number, table_file(0, self._spec.shard), tensors, {})
        self._channel.send(write_part(Folder(Path(self._spec.folder)), job))


def run_batch_shard(channel: Channel, spec: BatchShardSpec) -> None:
    """Until the supervisor closes the channel."""
    try:
        shard = _Shard(channel, spec)
        while True:
            shard.hear(channel.receive())
    except Closed:
        return
    except Exception as error:
        channel.try_send(m.ShardRaised(spec.shard, None, traceback.format_exc()))
        raise SystemExit(1) from error

"""One published gradient in memory: values, buffers, which parameters have one, group options (M1).

A slot is a block of bytes that a learner fills and shards read; the same class serves shared and private
memory. Not responsible for when it may be filled or read.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.table.layout import LINE, Layout, Part
from syncline.table.optimizer_template import from_plain, to_plain

OPTIONS_ROOM = 16384  # bytes for the group options as JSON
STATES_ROOM = 16384  # bytes for a learner's random states


class SlotOffsets:
    """Where in a slot what lies, in bytes; values come first."""

    def __init__(self, layout: Layout) -> None:
        count = len(layout.parameters.entries)
        self.buffers = layout.parameters.nbytes
        self.mask = self.buffers + layout.buffers.nbytes
        self.mask_end = self.mask + count
        self.options = self.mask + -(-count // LINE) * LINE
        self.states = self.options + OPTIONS_ROOM
        self.end = self.states + STATES_ROOM


def slot_bytes(layout: Layout) -> int:
    return SlotOffsets(layout).end


class Slot:
    """Views over one slot's memory, a uint8 tensor of `slot_bytes(layout)`; values and buffers lie elsewhere where that is given."""

    def __init__(self, layout: Layout, memory: Tensor, values: Tensor | None = None) -> None:
        self._layout = layout
        flat, buffers = layout.parameters, layout.buffers
        self.memory = memory
        values = memory if values is None else values
        self.segments = flat.segments(values)
        at = SlotOffsets(layout)
        self.buffers = buffers.views(buffers.segments(values[at.buffers :]))
        self.mask = memory[at.mask : at.mask_end]  # uint8: 1 where the parameter has a gradient
        self._options = memoryview(memory[at.options : at.states].numpy())  # type: ignore[arg-type]
        self._states = memoryview(memory[at.states : at.end].numpy())  # type: ignore[arg-type]

    @cached_property
    def gradients(self) -> list[Tensor]:
        """One view per parameter."""
        return self._layout.parameters.views(self.segments)

    def part(self, part: Part) -> SlotPart:
        return SlotPart(self, part, self._layout)

    def write_options(self, text: bytes) -> None:
        _put(self._options, text)

    def options_text(self) -> bytes:
        return _get(self._options)

    def read_options(self) -> list[dict[str, Any]]:
        return options_of(_get(self._options))

    def write_states(self, states: bytes) -> None:
        """The learner's random states, for a checkpoint; none where they do not fit."""
        _put(self._states, states if len(states) <= STATES_ROOM - 8 else b"")

    def read_states(self) -> bytes:
        return _get(self._states)


class SlotPart:
    """What one shard sees of a slot."""

    def __init__(self, slot: Slot, part: Part, layout: Layout) -> None:
        self.slot = slot
        self.segments = part.segments(slot.segments)
        self.views = part.views(self.segments, layout.parameters.entries)
        self._entries = [piece.entry for piece in part.pieces]

    def present(self) -> tuple[bool, ...]:
        """For each of the shard's pieces: is there a gradient?"""
        mask = self.slot.mask.tolist()
        return tuple(bool(mask[entry]) for entry in self._entries)


def options_text(options: list[dict[str, Any]]) -> bytes:
    """Return group options as they travel."""
    plain = [{key: to_plain(value) for key, value in group.items()} for group in options]
    text = json.dumps(plain, default=_refuse).encode()
    if len(text) > OPTIONS_ROOM - 8:
        raise UsageError(
            f"the options of {len(options)} parameter groups take {len(text)} bytes, more than the "
            f"{OPTIONS_ROOM - 8} that travel with a gradient; use fewer groups or smaller options"
        )
    return text


def options_of(text: bytes) -> list[dict[str, Any]]:
    """Return the group options of such a text."""
    return [{key: from_plain(value) for key, value in group.items()} for group in json.loads(text)]


def private_slot(layout: Layout) -> Slot:
    return Slot(layout, torch.zeros(slot_bytes(layout), dtype=torch.uint8))


def _put(room: memoryview, data: bytes) -> None:
    room[:8] = len(data).to_bytes(8, "little")
    room[8 : 8 + len(data)] = data


def _get(room: memoryview) -> bytes:
    return bytes(room[8 : 8 + int.from_bytes(room[:8], "little")])


def _refuse(value: object) -> Any:
    raise UsageError(
        f"a parameter group's option of type {type(value).__name__} cannot travel with a gradient"
    )

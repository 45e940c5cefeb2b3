"""One gradient in memory (M1): values, buffers, mask, options and random states lie apart, in memory of one's own or beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.errors import UsageError
from syncline.table.gradient_slot import (
    OPTIONS_ROOM,
    STATES_ROOM,
    Slot,
    options_text,
    private_slot,
    slot_bytes,
)
from syncline.table.layout import LINE, Layout, lay_out


def layout_of(shards: int = 2) -> Layout:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return lay_out(model, [model.parameters()], cuttable=True, shards=shards)[0]


def test_a_slot_holds_gradients_buffers_mask_and_options_apart() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    layout, tensors = lay_out(model, [model.parameters()], cuttable=True, shards=2)
    slot = private_slot(layout)
    options = [{"lr": 0.5, "betas": [0.1, 0.2], "maximize": False, "foreach": None}]
    slot.write_options(options_text([{**options[0], "lr": torch.tensor(0.5)}]))
    slot.mask.copy_(torch.tensor([1, 0, 1, 1]))
    for number, tensor in enumerate([*slot.gradients, *slot.buffers]):
        tensor.fill_(number + 1)
    assert slot.read_options() == options
    assert slot.mask.tolist() == [1, 0, 1, 1]
    for number, tensor in enumerate([*slot.gradients, *slot.buffers]):
        assert torch.equal(tensor, torch.full_like(tensor, number + 1))
    assert [b.dtype for b in slot.buffers] == [b.dtype for b in tensors.buffers]
    found = {}
    for part in layout.parts:
        found |= dict(zip([piece.entry for piece in part.pieces], slot.part(part).present(), strict=True))
    assert found == {0: True, 1: False, 2: True, 3: True}


def test_options_that_cannot_travel_are_refused() -> None:
    with pytest.raises(UsageError, match="more than the 16376"):
        options_text([{"note": "x" * 20000}])
    with pytest.raises(UsageError, match="type object cannot travel"):
        options_text([{"odd": object()}])


def test_options_of_two_slots_in_one_memory_do_not_meet() -> None:
    layout = layout_of()
    size = slot_bytes(layout)
    assert size % LINE == 0, "the next one begins on a line"
    memory = torch.zeros(2 * size, dtype=torch.uint8)
    slots = [Slot(layout, memory[at : at + size]) for at in (0, size)]
    for number, slot in enumerate(slots):
        slot.write_options(options_text([{"lr": float(number), "note": "x" * (number * 9000)}]))
        slot.write_states(bytes([number]) * (STATES_ROOM - 8))
        slot.mask.fill_(number)
    for number, slot in enumerate(slots):
        assert slot.read_options()[0]["lr"] == number and len(slot.options_text()) < OPTIONS_ROOM
        assert slot.read_states() == bytes([number]) * (STATES_ROOM - 8)
        assert set(slot.mask.tolist()) == {number}
        assert all(bool((segment == 0).all()) for segment in slot.segments)


def test_shorter_texts_replace_longer_ones_and_states_that_do_not_fit_are_left_out() -> None:
    slot = private_slot(layout_of())
    assert slot.read_states() == b"" and slot.options_text() == b""
    slot.write_options(b"[1, 2, 3]")
    slot.write_options(b"[]")
    slot.write_states(b"abc")
    assert slot.options_text() == b"[]" and slot.read_states() == b"abc"
    slot.write_states(b"x" * (STATES_ROOM - 7))
    assert slot.read_states() == b"" and slot.options_text() == b"[]"


def test_values_may_lie_elsewhere_with_the_buffers_behind_them() -> None:
    layout = layout_of()
    memory, values = (torch.zeros(slot_bytes(layout), dtype=torch.uint8) for _ in range(2))
    slot = Slot(layout, memory, values)
    for tensor in (*slot.gradients, *slot.buffers):
        tensor.fill_(1)
    slot.mask.fill_(1)
    assert not memory[: layout.parameters.nbytes + layout.buffers.nbytes].any() and values.any()
    assert slot.part(layout.parts[0]).present() == (True,) * len(layout.parts[0].pieces)

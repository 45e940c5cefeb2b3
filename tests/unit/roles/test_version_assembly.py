"""The parts of a version become its tensors again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.messages import WeightsPart
from syncline.roles.version_assembly import Assembly, assemble
from syncline.table.layout import Layout, lay_out
from tests.unit.roles.doubles import LONG, SHORT, layout


def parts(of: Layout, version: int = 1, tag: str = "final", table: int = 0) -> list[WeightsPart]:
    """Every element has its own number; the leading shard has the buffers."""
    flat = of.parameters
    segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))
    for view in flat.views(segments):
        view.copy_(torch.arange(view.numel()).view(view.shape))
    buffers = [torch.full(entry.shape, 5.0) for entry in of.buffers.entries]
    return [
        WeightsPart(tag, table, number, version, part.segments(segments), None if number else buffers)
        for number, part in enumerate(of.parts)
    ]


def test_the_tensors_are_whole_however_they_were_cut() -> None:
    for shards in (1, 2, 3):
        of = layout(shards, buffers=1)
        for came in (parts(of), parts(of)[::-1]):
            found = assemble(of, came)
            assert torch.equal(found["long"], torch.arange(LONG).float())
            assert torch.equal(found["short"], torch.arange(SHORT).float())
            assert found["seen0"].tolist() == [5.0, 5.0] and len(found) == 3


def test_tied_parameters_have_all_their_names() -> None:
    model = nn.Module()
    model.one = nn.Parameter(torch.zeros(4))
    model.other = model.one
    of, _ = lay_out(model, [model.parameters()], cuttable=True, shards=1)
    found = assemble(of, parts(of))
    assert found["other"] is found["one"] and found["one"].tolist() == [0, 1, 2, 3]


def test_a_version_is_complete_with_the_last_part_of_its_last_table() -> None:
    layouts = {0: layout(2), 1: layout(1)}
    first, second = parts(layouts[0])
    (other,) = parts(layouts[1], version=9, table=1)
    assembly = Assembly()
    for part in (first, other, *parts(layouts[0], tag="epoch:3")):
        assert not assembly.complete("final", layouts)
        assembly.add(part)
    assert not assembly.complete("final", layouts)
    assembly.add(second)
    assert assembly.complete("final", layouts)
    taken = assembly.take("final", layouts)
    assert {table: version for table, (version, _) in taken.items()} == {0: 1, 1: 9}
    assert not assembly.complete("final", layouts)  # what was taken is not here any more


def test_parts_of_different_versions_are_no_version() -> None:
    of = layout(2)
    assembly = Assembly()
    assembly.add(parts(of)[0])
    assembly.add(parts(of, version=2)[1])
    with pytest.raises(AssertionError, match=r"final: shards of table 0 report versions \[1, 2\]"):
        assembly.take("final", {0: of})

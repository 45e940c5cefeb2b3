"""Named vectors on a shard: every command as numpy has it, in every dtype, however the parameters are cut."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from syncline.batch import commands as c
from syncline.errors import RunError
from syncline.learn.portion_worker import batch_layout
from syncline.table.checkpoints import write_tensors
from syncline.table.vectors import CHUNK, Vectors, read_vectors, vector_tensors
from tests.unit.batch.plain import Plain

NAMES = ("x", "g", "d")
PROGRAM = (
    c.Fill("g", 0.5),
    c.Axpy("g", -2.0, "x"),
    c.Dot("xg", "x", "g"),
    c.Dot("gg", "g", "g"),
    c.Copy("d", "g"),
    c.Multiply("d", "x"),
    c.Scale("d", 0.25),
    c.Largest("d", "d"),
    c.Swap("g", "d"),
    c.Combine("d", ((1.5, "d"), (-1.0, "x"), (2.0, "g"))),
    c.Swap("x", "d"),
    c.Dot("xd", "x", "d"),
)


def values(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("size", [1, 7, CHUNK, 2 * CHUNK + 5])
def test_commands_do_what_numpy_does(size: int) -> None:
    start = values(size)
    plain = Plain(lambda x: (0.0, x), NAMES, start.numpy().copy())
    expected = plain.run(PROGRAM)
    vectors = Vectors(NAMES, [start.clone()])
    measured = vectors.run(PROGRAM)
    assert measured == pytest.approx(list(expected.values()), rel=1e-12)
    for name in NAMES:
        np.testing.assert_allclose(vectors[name][0].numpy(), plain.whole(name), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dots_are_added_in_float64_whatever_the_dtype(dtype: torch.dtype) -> None:
    start = values(100_000, dtype)
    (found,) = Vectors(NAMES, [start]).run((c.Dot("xx", "x", "x"),))
    assert found == pytest.approx(float(start.double() @ start.double()), rel=1e-13)


def test_x_stays_where_it_lies_whatever_is_swapped() -> None:
    memory = values(CHUNK + 3)
    before = memory.clone()
    vectors = Vectors(NAMES, [memory])
    vectors.run((c.Fill("d", 3.0), c.Swap("x", "d"), c.Swap("d", "g")))
    assert vectors["x"][0] is memory and bool((memory == 3).all())
    assert torch.equal(vectors["g"][0], before)


def test_numbers_beyond_a_dtype_become_infinite_not_errors() -> None:
    vectors = Vectors(NAMES, [torch.ones(4)])
    measured = vectors.run((c.Combine("d", ((1e300, "x"),)), c.Largest("d", "d"), c.Scale("g", -1e300)))
    assert measured == (math.inf,)


def test_what_is_not_a_number_is_not_hidden_by_larger_ones() -> None:
    (found,) = Vectors(NAMES, [torch.tensor([1.0, math.nan, 5.0])]).run((c.Largest("x", "x"),))
    assert math.isnan(found)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (2, 2)])
def test_vectors_survive_their_files_for_any_number_of_shards(
    tmp_path: Path, before: int, after: int
) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7).double())
    old, new = batch_layout(model, before), batch_layout(model, after)
    whole = {name: _flat(old.parameters, seed) for seed, name in enumerate(NAMES)}
    files = []
    for shard, part in enumerate(old.parts):
        vectors = Vectors(NAMES, part.segments(whole["x"]))
        for name in ("g", "d"):
            vectors.add(name, part.segments(whole[name]), first=True)
        files.append(f"{shard}.safetensors")
        write_tensors(tmp_path / files[-1], vector_tensors(old, shard, vectors))
    for shard, part in enumerate(new.parts):
        vectors = Vectors(NAMES, [torch.zeros_like(each) for each in part.segments(whole["x"])])
        read_vectors(tmp_path, files, new, shard, vectors)
        for name in NAMES:
            for found, expected in zip(vectors[name], part.segments(whole[name]), strict=True):
                assert torch.equal(found, expected)


def _flat(flat: object, seed: int) -> list[Tensor]:
    """Values with zeros in the padding, as they always are."""
    generator = torch.Generator().manual_seed(seed)
    segments = flat.segments(torch.zeros(flat.nbytes, dtype=torch.uint8))  # type: ignore[attr-defined]
    for view in flat.views(segments):  # type: ignore[attr-defined]
        view.copy_(torch.randn(view.shape, generator=generator))
    return segments


def test_a_checkpoint_that_lacks_a_part_of_the_weights_is_refused(tmp_path: Path) -> None:
    layout = batch_layout(nn.Linear(600, 4), 2)
    x = _flat(layout.parameters, 0)
    vectors = Vectors(NAMES, layout.parts[0].segments(x))
    write_tensors(tmp_path / "0.safetensors", vector_tensors(layout, 0, vectors))
    other = Vectors(NAMES, layout.parts[1].segments(x))
    with pytest.raises(RunError, match="lacks parts of the vectors"):
        read_vectors(tmp_path, ["0.safetensors"], layout, 1, other)

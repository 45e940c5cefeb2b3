"""Where blocks lie and how rows are numbered."""

import pytest
import torch

from syncline.errors import UsageError
from syncline.kernels.geometry import Geometry


def test_numbers_of_the_papers_first_layer() -> None:
    geometry = Geometry(channels=3, height=200, width=200, field=20, step=4, block=(4, 4, 8))
    assert geometry.grid == (46, 46) and geometry.blocks == 2116
    assert geometry.weight_shape == (2116, 128, 1200) and geometry.parameters == 325_017_600
    assert geometry.output_size == (184, 184) and geometry.neurons == 2116 * 128


def test_the_last_pixels_are_left_out_where_the_step_does_not_divide() -> None:
    geometry = Geometry(channels=1, height=10, width=11, field=4, step=3)
    assert geometry.grid == (3, 3)  # 0, 3, 6: row 9 is seen, column 10 is not


def test_rows_and_maps_are_numbered_as_documented() -> None:
    geometry = Geometry(channels=1, height=6, width=5, field=2, step=2, block=(2, 3, 4))
    high, wide = geometry.grid
    rows = torch.arange(geometry.neurons).view(geometry.blocks, geometry.rows)
    maps = geometry.to_maps(rows)
    assert maps.shape == (4, high * 2, wide * 3)
    for p in range(high):
        for q in range(wide):
            for i in range(2):
                for j in range(3):
                    for k in range(4):
                        assert maps[k, p * 2 + i, q * 3 + j] == rows[p * wide + q, (i * 3 + j) * 4 + k]
    assert torch.equal(geometry.to_rows(maps), rows)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"field": 9}, "a field of 9 x 9 does not fit into images of 8 x 12"),
        ({"step": 0}, "step must be at least 1, got 0"),
        ({"channels": 0}, "in_channels must be at least 1"),
        ({"block": (4, 4)}, "three numbers"),
        ({"block": (4, 0, 4)}, "block width must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(wrong: dict[str, int], words: str) -> None:
    right = {"channels": 1, "height": 8, "width": 12, "field": 4, "step": 2}
    with pytest.raises(UsageError, match=words):
        Geometry(**(right | wrong))

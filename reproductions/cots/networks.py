"""The networks of the COTS paper (C5): three stacks on images of 200 x 200 x 3.

The paper gives fields, blocks and steps, but neither stride nor padding of pooling and normalisation, so the count of
weights has to be read from them. Pooling and normalisation have windows of 5 and stride 1 here; of 'same' and 'valid'
each network takes the one whose count comes nearer to the paper's "about 1.8" and "over 11" billion:

    name    padding    blocks of the three stacks    weights           the other padding gives
    1.8b    same       46², 42², 38²                  1,639,014,400     1,453,875,200
    11b     valid      46², 37², 28²                 12,160,309,248    14,241,208,320
"""

from __future__ import annotations

import torch
from torch import nn

from syncline.errors import UsageError
from syncline.nn.block_local import StackShape, build_stacks

IMAGE = (3, 200)  # channels, height and width
NETWORKS: dict[str, tuple[StackShape, ...]] = {
    "1.8b": (StackShape(field=20, step=4, block=(4, 4, 8)),) * 3,
    "11b": (
        StackShape(field=20, step=4, block=(4, 4, 18), padding="valid"),
        StackShape(field=32, step=4, block=(4, 4, 18), padding="valid"),
        StackShape(field=32, step=4, block=(4, 4, 18), padding="valid"),
    ),
}


def cots_network(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Sequential:
    """The network `name`, with random weights; on device "meta" it has shapes alone."""
    if name not in NETWORKS:
        raise UsageError(f"no network {name!r}: there are {', '.join(NETWORKS)}")
    channels, size = IMAGE
    return build_stacks(channels, size, NETWORKS[name], device=device, dtype=dtype)

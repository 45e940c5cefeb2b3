"""BlockLocal2d: untied, locally connected filters whose neurons share fields in blocks (C1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncline.kernels.block_local import wide
from syncline.kernels.block_local_ops import batch_first, block_local, block_local_transposed
from syncline.kernels.geometry import Geometry


class BlockLocal2d(nn.Module):
    """Every neuron has weights of its own over its field; the neurons of a block share one field.

    Input (N, in_channels, H, W); output (N, depth, nH·bh, nW·bw) with nH = ⌊(H − field)/step⌋ + 1 blocks. `weight` is
    (nH·nW, bh·bw·depth, in_channels·field·field): neuron (i, j, k) of a block at row (i·bw + j)·depth + k, the field
    flattened as (channel, y, x). Where the step does not divide H − field, the last rows of pixels are seen by nobody.

    With `unit_norm` the response is that of W = W̃/‖W̃‖ for each filter, `weight` being W̃ (C3). Images are brought to
    the weight's dtype for the product and responses come back in the images'. No bias.
    """

    def __init__(
        self,
        in_channels: int,
        image_size: int | tuple[int, int],
        *,
        field: int,
        step: int,
        block: tuple[int, int, int] = (4, 4, 8),
        unit_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.geometry = Geometry(
            channels=in_channels, height=height, width=width, field=field, step=step, block=block
        )
        self.unit_norm = unit_norm
        self.weight = nn.Parameter(torch.empty(self.geometry.weight_shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights with filters of norm 1 in the mean."""
        nn.init.normal_(self.weight, std=self.geometry.fan_in**-0.5)

    def scale(self) -> Tensor:
        """(B, R), 1/‖W̃‖ of every filter; differentiable."""
        norms = torch.linalg.vector_norm(self.weight, dim=2, dtype=wide(self.weight.dtype))
        return norms.reciprocal()

    def forward(self, images: Tensor) -> Tensor:
        responses = block_local(images, self.weight, self.geometry)
        return responses * self._scale_maps(responses) if self.unit_norm else responses

    def decode(self, responses: Tensor) -> Tensor:
        """Wᵀ y: (N, depth, nH·bh, nW·bw) → (N, in_channels, H, W)."""
        if self.unit_norm:
            responses = responses * self._scale_maps(responses)
        return block_local_transposed(responses, self.weight, self.geometry)

    def _scale_maps(self, like: Tensor) -> Tensor:
        return batch_first(self.geometry.to_maps(self.scale()).unsqueeze(3)).to(like.dtype)

    def extra_repr(self) -> str:
        return f"{self.geometry}, {self.geometry.parameters:,} weights, unit_norm={self.unit_norm}"


class BlockLocalDecoder2d(nn.Module):
    """Wᵀ y of a filter, as a layer of its own that shares the filter's weights."""

    def __init__(self, filter: BlockLocal2d) -> None:
        super().__init__()
        self.filter = filter

    def forward(self, responses: Tensor) -> Tensor:
        return self.filter.decode(responses)

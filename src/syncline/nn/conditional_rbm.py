"""Conditional RBMs of time series: the past frames shift the biases of visible and hidden units.

E(v, h | u) = −hᵀ W v − (c + B u)ᵀ h − (b + A u)ᵀ v  (+ ‖v‖²/2 for Gaussian units), u being the past frames, oldest first
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.energy import Contrastive, Units, fill
from syncline.nn.file_arguments import COUNT, check


class CRBM(nn.Module, Contrastive):
    """Takes windows (N, order + 1, visible), the last frame being the present one, and gives its hidden units' means.

    `weight` (hidden × visible), `hidden_bias`, `visible_bias`; `past_visible` A (visible × order·visible) and `past_hidden` B
    (hidden × order·visible). It is trained by `gradient="cd:k"`.
    """

    def __init__(
        self,
        visible: int,
        hidden: int,
        *,
        order: int = 3,
        units: str = "gaussian",
        decay: float = 0.0,
        std: float = 0.01,
    ) -> None:
        super().__init__()
        check(COUNT, visible=visible, hidden=hidden, order=order)
        if units == "softmax":
            raise UsageError("a CRBM has 'gaussian' or 'bernoulli' units, got 'softmax'")
        self.order, self.decay = order, decay
        self.units, self.code = Units(units), Units("bernoulli")
        self.weight = nn.Parameter(torch.randn(hidden, visible) * std)
        self.past_visible = nn.Parameter(torch.randn(visible, order * visible) * std)
        self.past_hidden = nn.Parameter(torch.randn(hidden, order * visible) * std)
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        self.visible_bias = nn.Parameter(torch.zeros(visible))

    def extra_repr(self) -> str:
        hidden, visible = self.weight.shape
        return f"{visible} {self.units.kind}, {hidden} bernoulli, order {self.order}"

    def forward(self, windows: Tensor) -> Tensor:
        past, present = self.parts(windows)
        return self.hidden(present, past)

    def parts(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """(N, order·V) past frames and (N, V) the present one."""
        wanted = (self.order + 1, self.weight.shape[1])
        if windows.dim() != 3 or tuple(windows.shape[1:]) != wanted:
            raise UsageError(
                f"a CRBM of order {self.order} takes windows (N, {wanted[0]}, {wanted[1]}), got {tuple(windows.shape)}"
            )
        return windows[:, :-1].flatten(1), windows[:, -1]

    def hidden(self, visible: Tensor, past: Tensor) -> Tensor:
        return self.code.mean(
            F.linear(visible, self.weight, self.hidden_bias) + F.linear(past, self.past_hidden)
        )

    def visible(self, hidden: Tensor, past: Tensor) -> Tensor:
        return self.units.mean(
            F.linear(hidden, self.weight.t(), self.visible_bias) + F.linear(past, self.past_visible)
        )

    # -- training ----------------------------------------------------------------------------------------

    def check_way(self, persistent: bool) -> None:
        if persistent:
            raise UsageError("a CRBM's chains hang on the past of each example: give gradient='cd:k'")

    def begin_chains(self, count: int) -> None:
        self.check_way(True)

    @torch.no_grad()
    def contrastive_divergence(self, data: Tensor, steps: int = 1, *, persistent: bool = False) -> Tensor:
        self.check_way(persistent)
        past, present = self.parts(data)
        on = then = self.hidden(present, past)
        seen = back = present
        for step in range(steps):
            mean = self.visible(self.code.sample(then), past)
            back = mean if step == 0 else back
            seen = self.units.sample(mean)
            then = self.hidden(seen, past)
        share = 1 / len(data)
        change_v, change_h = (seen - present) * share, (then - on) * share
        fill(self.weight, share * (then.t() @ seen - on.t() @ present) + self.decay * self.weight)
        fill(self.past_visible, change_v.t() @ past + self.decay * self.past_visible)
        fill(self.past_hidden, change_h.t() @ past + self.decay * self.past_hidden)
        fill(self.visible_bias, change_v.sum(0))
        fill(self.hidden_bias, change_h.sum(0))
        return (present - back).square().sum() * share

    @torch.no_grad()
    def reconstruction_error(self, data: Tensor) -> Tensor:
        past, present = self.parts(data)
        back = self.visible(self.hidden(present, past), past)
        return (present - back).square().sum() / len(data)

    @torch.no_grad()
    def generate(self, start: Tensor, frames: int, steps: int = 30) -> Tensor:
        """Go on from `start` (order, visible) by so many frames, each the mean after Gibbs steps: (frames, visible)."""
        series = [*start[-self.order :]]
        for _ in range(frames):
            past = torch.cat(series[-self.order :])[None]
            mean = series[-1][None]
            for _ in range(steps):
                mean = self.visible(self.code.sample(self.hidden(mean, past)), past)
            series.append(mean[0])
        return torch.stack(series[self.order :])


def windows(series: Tensor, order: int) -> Tensor:
    """All windows of a series (T, visible) that a CRBM of this order takes: (T − order, order + 1, visible)."""
    if series.dim() != 2 or len(series) <= order:
        raise UsageError(
            f"a series (T, visible) of more than {order} frames is needed, got {tuple(series.shape)}"
        )
    return series.unfold(0, order + 1, 1).transpose(1, 2).contiguous()

"""Energy models: what contrastive divergence asks of one, the units they are made of, and (conditional) RBMs.

RBM:   E(v, h) = −hᵀ W v − cᵀ h − bᵀ v          (+ ‖v‖²/2 for Gaussian units of variance 1, likewise for h)
CRBM:  E(v, h | u) = −hᵀ W v − (c + B u)ᵀ h − (b + A u)ᵀ v  (+ ‖v‖²/2), u being the past frames, oldest first

Random numbers come from torch's generators, which every learner has seeded for itself. Legend: N examples, V visible and
H hidden units, K chains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.argument_checks import COUNT, check

CHAINS = "chains"  # the buffer of persistent chains; each learner has its own, and no saved model has any


class Contrastive(ABC):
    """What `gradient="cd:k"` and `"pcd:k"` train."""

    @abstractmethod
    def contrastive_divergence(self, data: Tensor, steps: int = 1, *, persistent: bool = False) -> Tensor:
        """Add the gradient of k Gibbs steps to `.grad`; the reconstruction error, for the record."""

    @abstractmethod
    def reconstruction_error(self, data: Tensor) -> Tensor:
        """Mean over examples of the squared error after one way up and down, without drawing."""

    @abstractmethod
    def begin_chains(self, count: int) -> None:
        """Persistent chains, all units off, unless there are so many already."""

    def check_way(self, persistent: bool) -> None:
        """Refuse plain or persistent chains, where the model has no such way."""
        return


class Units:
    """A kind of units: their mean given the input, samples given the mean, and their part of free energies."""

    def __init__(self, kind: str, classes: int | None = None, count: int = 0) -> None:
        if kind not in ("bernoulli", "gaussian", "softmax"):
            raise UsageError(f"units are 'bernoulli', 'gaussian' or 'softmax', got {kind!r}")
        if (kind == "softmax") != (classes is not None):
            raise UsageError("units='softmax' needs classes=, the size of each group; other units have none")
        if classes is not None and (not isinstance(classes, int) or classes < 2 or count % classes):
            raise UsageError(f"{count} softmax units are no groups of classes={classes!r}")
        self.kind, self.classes = kind, classes

    def mean(self, inputs: Tensor) -> Tensor:
        if self.kind == "bernoulli":
            return torch.sigmoid(inputs)
        return self._groups(inputs).softmax(-1).flatten(-2) if self.kind == "softmax" else inputs

    def sample(self, mean: Tensor) -> Tensor:
        if self.kind == "bernoulli":
            return torch.bernoulli(mean)
        if self.kind == "gaussian":
            return mean + torch.randn_like(mean)
        groups = self._groups(mean)
        drawn = torch.multinomial(groups.reshape(-1, groups.shape[-1]), 1)
        return torch.zeros_like(groups).reshape(-1, groups.shape[-1]).scatter_(1, drawn, 1.0).view_as(mean)

    def log_sum(self, inputs: Tensor) -> Tensor:
        """log Σ over all states of these units of exp(state · input); Gaussian ones with exp(−state²/2). (…, units) → (…)"""
        if self.kind == "bernoulli":
            return nn.functional.softplus(inputs).sum(-1)
        if self.kind == "softmax":
            return self._groups(inputs).logsumexp(-1).sum(-1)
        return 0.5 * inputs.square().sum(-1) + 0.5 * inputs.shape[-1] * LOG_2PI

    def _groups(self, values: Tensor) -> Tensor:
        assert self.classes is not None
        return values.unflatten(-1, (-1, self.classes))


LOG_2PI = 1.8378770664093453


def fill(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad`, where the parameter is trained."""
    if parameter.requires_grad:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def keep_chains(model: nn.Module, count: int, units: int, like: Tensor) -> None:
    """Of a model whose chains have so many units."""
    there = getattr(model, CHAINS, None)
    if there is None or there.shape != (count, units):
        model.register_buffer(CHAINS, like.new_zeros(count, units).detach(), persistent=False)


class Parts(Contrastive):
    """Several energy models, each on what reaches it from below; frozen ones only pass on."""

    @abstractmethod
    def reached(self, data: Tensor) -> Iterator[tuple[Contrastive, Tensor]]:
        """Those that are trained, and their data."""

    @abstractmethod
    def members(self) -> list[Contrastive]:
        """Those that are trained."""

    @torch.no_grad()
    def contrastive_divergence(self, data: Tensor, steps: int = 1, *, persistent: bool = False) -> Tensor:
        errors = [
            part.contrastive_divergence(reaching, steps, persistent=persistent)
            for part, reaching in self.reached(data)
        ]
        return torch.stack(errors).sum()

    @torch.no_grad()
    def reconstruction_error(self, data: Tensor) -> Tensor:
        errors = [part.reconstruction_error(reaching) for part, reaching in self.reached(data)]
        return torch.stack(errors).sum()

    def begin_chains(self, count: int) -> None:
        for part in self.members():
            part.begin_chains(count)

    def check_way(self, persistent: bool) -> None:
        for part in self.members():
            part.check_way(persistent)


def is_trained(part: object) -> bool:
    return isinstance(part, nn.Module) and any(parameter.requires_grad for parameter in part.parameters())


class RBM(nn.Module, Contrastive):
    """`weight` (hidden × visible), `hidden_bias`, `visible_bias`; calling it gives the hidden units' means.

    `units` and `code` are the visible and hidden units: "bernoulli", "gaussian", visible ones also "softmax" in groups of
    `classes`. `decay` is that of the weights alone (the optimizer's would shrink biases too); with a `sparsity` target hidden
    biases are pushed until units are on in that share of examples, by `sparsity_cost`. Inputs are flattened.
    """

    chains: Tensor

    def __init__(
        self,
        visible: int,
        hidden: int,
        *,
        units: str = "bernoulli",
        code: str = "bernoulli",
        classes: int | None = None,
        decay: float = 0.0,
        sparsity: float | None = None,
        sparsity_cost: float = 0.1,
        std: float = 0.01,
    ) -> None:
        super().__init__()
        check(COUNT, visible=visible, hidden=hidden)
        self.units, self.code = Units(units, classes, visible), Units(code)
        self.decay, self.sparsity, self.sparsity_cost = decay, sparsity, sparsity_cost
        self.weight = nn.Parameter(torch.randn(hidden, visible) * std)
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        self.visible_bias = nn.Parameter(torch.zeros(visible))

    def extra_repr(self) -> str:
        hidden, visible = self.weight.shape
        return f"{visible} {self.units.kind}, {hidden} {self.code.kind}"

    def forward(self, visible: Tensor) -> Tensor:
        return self.hidden(visible.flatten(1))

    def hidden(self, visible: Tensor) -> Tensor:
        """Means given the visible units: (N, V) → (N, H)."""
        return self.code.mean(F.linear(visible, self.weight, self.hidden_bias))

    def visible(self, hidden: Tensor) -> Tensor:
        """Means given the hidden units: (N, H) → (N, V)."""
        return self.units.mean(F.linear(hidden, self.weight.t(), self.visible_bias))

    def free_energy(self, visible: Tensor) -> Tensor:
        """−log Σ_h exp(−E(v, h)), per example."""
        inputs = F.linear(visible, self.weight, self.hidden_bias)
        total = self.code.log_sum(inputs) + visible @ self.visible_bias
        return 0.5 * visible.square().sum(-1) - total if self.units.kind == "gaussian" else -total

    @torch.no_grad()
    def gibbs(self, visible: Tensor, steps: int = 1) -> Tensor:
        """Samples of the visible units, so many steps on."""
        for _ in range(steps):
            visible = self.units.sample(self.visible(self.code.sample(self.hidden(visible))))
        return visible

    # -- training ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def contrastive_divergence(self, data: Tensor, steps: int = 1, *, persistent: bool = False) -> Tensor:
        data = data.flatten(1)
        on = self.hidden(data)  # (N, H)
        if persistent:
            if not hasattr(self, CHAINS):
                self.begin_chains(len(data))
            seen = self.gibbs(self.chains, steps)
            self.chains.copy_(seen)
            back = self.visible(on)
        else:
            back = self.visible(self.code.sample(on))
            seen = self.gibbs(self.units.sample(back), steps - 1)
        then, here, there = self.hidden(seen), 1 / len(data), 1 / len(seen)
        # ⟨…⟩ of the chains minus that of the data
        weight = torch.mm(on.t(), data)
        torch.addmm(weight, then.t(), seen, beta=-here, alpha=there, out=weight)
        if self.decay:
            weight.add_(self.weight, alpha=self.decay)
        hidden = then.sum(0) * there - on.sum(0) * here
        if self.sparsity is not None:
            hidden.add_(on.mean(0) - self.sparsity, alpha=self.sparsity_cost)
        fill(self.weight, weight)
        fill(self.hidden_bias, hidden)
        fill(self.visible_bias, seen.sum(0) * there - data.sum(0) * here)
        return (data - back).square().sum() / len(data)

    def begin_chains(self, count: int) -> None:
        keep_chains(self, count, self.weight.shape[1], self.weight)

    # -- how good it is ----------------------------------------------------------------------------------

    @torch.no_grad()
    def reconstruction_error(self, data: Tensor) -> Tensor:
        data = data.flatten(1)
        return (data - self.visible(self.hidden(data))).square().sum() / len(data)

    @torch.no_grad()
    def log_partition(self) -> Tensor:
        """log Z, exactly, over all states of the hidden units: small machines only."""
        count = self.weight.shape[0]
        if count > 22 or self.code.kind != "bernoulli":
            raise UsageError(
                f"log Z goes through all states of Bernoulli hidden units, of at most 22, got {count} {self.code.kind}"
            )
        states = all_states(count, self.weight)
        inputs = F.linear(states, self.weight.t(), self.visible_bias)
        return (self.units.log_sum(inputs) + states @ self.hidden_bias).logsumexp(0)

    @torch.no_grad()
    def pseudo_likelihood(self, data: Tensor) -> Tensor:
        """Σ_i log P(v_i | all other v), exactly, mean over examples; of Bernoulli units."""
        if self.units.kind != "bernoulli":
            raise UsageError(f"the pseudo-likelihood is one of Bernoulli units, these are {self.units.kind}")
        data = data.flatten(1)
        inputs = F.linear(data, self.weight, self.hidden_bias)
        before = self.code.log_sum(inputs)
        total = torch.zeros_like(before)
        for unit in range(data.shape[1]):
            turned = 1 - 2 * data[:, unit]  # what changes when it flips
            after = self.code.log_sum(torch.addr(inputs, turned, self.weight[:, unit]))
            total -= F.softplus(after - before + turned * self.visible_bias[unit])
        return total.mean()


def all_states(units: int, like: Tensor) -> Tensor:
    """(2^units, units), in 0 and 1."""
    numbers = torch.arange(1 << units, device=like.device)
    return (numbers[:, None] >> torch.arange(units, device=like.device) & 1).to(like.dtype)


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
        own = F.linear(visible, self.weight, self.hidden_bias)
        return self.code.mean(own + F.linear(past, self.past_hidden))

    def visible(self, hidden: Tensor, past: Tensor) -> Tensor:
        own = F.linear(hidden, self.weight.t(), self.visible_bias)
        return self.units.mean(own + F.linear(past, self.past_visible))

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

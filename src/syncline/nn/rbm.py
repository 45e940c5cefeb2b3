"""The restricted Boltzmann machine: Bernoulli, Gaussian or softmax visible units, contrastive divergence.

E(v, h) = −hᵀ W v − cᵀ h − bᵀ v          (+ ‖v‖²/2 for Gaussian units of variance 1, likewise for h)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.errors import UsageError
from syncline.nn.energy import CHAINS, Contrastive, Units, fill, keep_chains
from syncline.nn.file_arguments import COUNT, check

MOST_STATES = 22  # units whose states are all gone through


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
        total = (
            self.code.log_sum(F.linear(visible, self.weight, self.hidden_bias)) + visible @ self.visible_bias
        )
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
        self._fill(data, on, seen, self.hidden(seen))
        return (data - back).square().sum() / len(data)

    def _fill(self, data: Tensor, on: Tensor, seen: Tensor, then: Tensor) -> None:
        """⟨…⟩ of the chains minus that of the data."""
        here, there = 1 / len(data), 1 / len(seen)
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
        if count > MOST_STATES or self.code.kind != "bernoulli":
            raise UsageError(
                f"log Z goes through all states of Bernoulli hidden units, of at most {MOST_STATES}, got {count} "
                f"{self.code.kind}"
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

"""RBMs against enumeration of all their states: probabilities, free energies, log Z, expected gradients, persistent chains."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.nn import DBN, RBM
from syncline.nn.energy import all_states

DOUBLE = torch.float64


def machine(visible: int = 4, hidden: int = 3, **options: object) -> RBM:
    torch.manual_seed(2)
    rbm = RBM(visible, hidden, std=0.7, **options).to(DOUBLE)  # type: ignore[arg-type]
    with torch.no_grad():
        rbm.hidden_bias.normal_(0, 0.5)
        rbm.visible_bias.normal_(0, 0.5)
    return rbm


@torch.no_grad()
def energy(rbm: RBM, v: Tensor, h: Tensor) -> Tensor:
    """Of all pairs, by loops: (V states, H states)."""
    found = torch.zeros(len(v), len(h), dtype=DOUBLE)
    for a, visible in enumerate(v):
        for b, hidden in enumerate(h):
            total = 0.0
            for i in range(len(visible)):
                total -= float(rbm.visible_bias[i] * visible[i])
                if rbm.units.kind == "gaussian":
                    total += float(visible[i] ** 2) / 2
                for j in range(len(hidden)):
                    total -= float(hidden[j] * rbm.weight[j, i] * visible[i])
            found[a, b] = total - float(rbm.hidden_bias @ hidden)
    return found


def joint(rbm: RBM) -> tuple[Tensor, Tensor, Tensor]:
    """States of visible and hidden units, and P(v, h)."""
    v, h = visible_states(rbm), all_states(rbm.weight.shape[0], rbm.weight)
    weights = torch.exp(-energy(rbm, v, h))
    return v, h, weights / weights.sum()


def visible_states(rbm: RBM) -> Tensor:
    v = all_states(rbm.weight.shape[1], rbm.weight)
    if rbm.units.kind == "softmax":
        v = v[(v.unflatten(1, (-1, rbm.units.classes)).sum(2) == 1).all(1)]  # type: ignore[arg-type]
    return v


KINDS = [{}, {"units": "softmax", "classes": 2}]


@pytest.mark.parametrize("options", KINDS)
def test_probabilities_free_energy_and_log_z_are_those_of_all_states(options: dict[str, object]) -> None:
    rbm = machine(**options)
    v, h, p = joint(rbm)
    weights = torch.exp(-energy(rbm, v, h))
    assert torch.allclose(rbm.log_partition(), weights.sum().log())
    assert torch.allclose(rbm.free_energy(v), -weights.sum(1).log())
    assert torch.allclose(rbm(v), (p @ h) / p.sum(1, keepdim=True))
    assert torch.allclose(rbm.visible(h), (p.t() @ v) / p.sum(0)[:, None])


def test_gaussian_units_by_integration() -> None:
    """One visible unit, on a fine grid."""
    rbm = machine(1, 3, units="gaussian")
    grid = torch.linspace(-12, 12, 4001, dtype=DOUBLE)[:, None]
    h = all_states(3, rbm.weight)
    weights = torch.exp(
        -(0.5 * grid**2 - grid * rbm.visible_bias - grid @ rbm.weight.t() @ h.t() - h @ rbm.hidden_bias)
    )
    step = 24 / 4000
    assert torch.allclose(rbm.log_partition(), (weights.sum() * step).log(), atol=1e-6)
    assert torch.allclose(rbm.free_energy(grid), -weights.sum(1).log(), atol=1e-8)
    means = (weights * grid).sum(0) / weights.sum(0)
    assert torch.allclose(rbm.visible(h)[:, 0], means, atol=1e-6)


def test_gaussian_units_are_drawn_with_variance_one() -> None:
    rbm = machine(1, 1, units="gaussian")
    torch.manual_seed(0)
    drawn = rbm.units.sample(torch.full((40_000, 1), 2.0))
    assert abs(drawn.mean() - 2) < 0.03 and abs(drawn.std() - 1) < 0.02


def transition(rbm: RBM, v: Tensor) -> Tensor:
    """P(v' | v) of one Gibbs step, over all states."""
    h = all_states(rbm.weight.shape[0], rbm.weight)
    given_v, given_h = rbm(v), rbm.visible(h)

    def likelihood(mean: Tensor, states: Tensor) -> Tensor:
        if rbm.units.kind == "softmax" and states.shape[1] == v.shape[1]:
            return (mean[:, None] ** states[None]).prod(-1)
        return (mean[:, None] * states + (1 - mean[:, None]) * (1 - states)).prod(-1)

    return likelihood(given_v, h) @ likelihood(given_h, v)


def expected_gradient(rbm: RBM, data: Tensor, steps: int) -> dict[str, Tensor]:
    """⟨∂E/∂θ⟩ at the data minus that after k steps, exactly."""
    v = visible_states(rbm)
    start = torch.stack([(v == row).all(1).to(DOUBLE) for row in data]).mean(0)
    after = start @ torch.linalg.matrix_power(transition(rbm, v), steps)
    on = rbm(v)
    change = after - start
    return {
        "weight": torch.einsum("s,sh,sv->hv", change, on, v),
        "hidden_bias": change @ on,
        "visible_bias": change @ v,
    }


def drawn_gradient(rbm: RBM, data: Tensor, steps: int, repeats: int) -> dict[str, Tensor]:
    torch.manual_seed(4)
    rbm.zero_grad()
    rbm.contrastive_divergence(data.repeat(repeats, 1), steps)
    return {name: parameter.grad for name, parameter in rbm.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_expected_gradient_of_cd_k_is_that_of_all_states(steps: int, options: dict[str, object]) -> None:
    rbm = machine(**options)
    data = visible_states(rbm)[[1, -1]]
    wanted = expected_gradient(rbm, data, steps)
    found = drawn_gradient(rbm, data, steps, 60_000)  # standard error below 0.5 / √120,000 = 0.0015
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=0.008), name


def test_many_steps_come_to_the_gradient_of_the_likelihood() -> None:
    rbm = machine()
    data = visible_states(rbm)[[3, 9]]
    rbm.zero_grad()
    (rbm.free_energy(data).mean() + _log_z(rbm)).backward()
    wanted = {name: p.grad.clone() for name, p in rbm.named_parameters()}  # type: ignore[union-attr]
    exact = expected_gradient(rbm, data, 300)
    for name, value in wanted.items():
        assert torch.allclose(exact[name], value, atol=1e-9), name


def _log_z(rbm: RBM) -> Tensor:
    return (-rbm.free_energy(visible_states(rbm))).logsumexp(0)


def test_persistent_chains_lose_their_bias_from_step_to_step() -> None:
    rbm = machine()
    v, _, p = joint(rbm)
    torch.manual_seed(1)
    rbm.begin_chains(40_000)
    wanted = p.sum(1) @ v
    errors = []
    for _ in range(12):
        rbm.contrastive_divergence(v[:1], persistent=True)  # the weights stay
        errors.append(float((rbm.chains.mean(0) - wanted).abs().max()))
    assert errors[0] > 0.03 and errors[-1] < 0.015


def test_a_sparsity_target_pushes_hidden_biases_alone() -> None:
    data = torch.rand(20, 4, dtype=DOUBLE).round()
    plain, sparse = machine(), machine(sparsity=0.1, sparsity_cost=0.5)
    found = [drawn_gradient(each, data, 1, 1) for each in (plain, sparse)]
    assert torch.equal(found[0]["weight"], found[1]["weight"])
    pushed = found[1]["hidden_bias"] - found[0]["hidden_bias"]
    assert torch.allclose(pushed, 0.5 * (plain(data).mean(0) - 0.1))


def test_decay_is_of_weights_alone() -> None:
    data = torch.rand(20, 4, dtype=DOUBLE).round()
    plain, decayed = machine(), machine(decay=0.25)
    found = [drawn_gradient(each, data, 1, 1) for each in (plain, decayed)]
    assert torch.allclose(found[1]["weight"] - found[0]["weight"], 0.25 * plain.weight)
    assert torch.equal(found[0]["hidden_bias"], found[1]["hidden_bias"])


def test_pseudo_likelihood_is_that_of_single_flips() -> None:
    rbm = machine()
    data = visible_states(rbm)[[2, 7, 11]]
    total = 0.0
    for row in data:
        for unit in range(4):
            flipped = row.clone()
            flipped[unit] = 1 - flipped[unit]
            here, there = torch.exp(-rbm.free_energy(torch.stack([row, flipped])).detach())
            total += math.log(here / (here + there))
    assert math.isclose(float(rbm.pseudo_likelihood(data)), total / 3, rel_tol=1e-9)


def test_gradients_add_up_and_frozen_parameters_get_none() -> None:
    rbm = machine()
    rbm.visible_bias.requires_grad_(False)
    data = torch.ones(3, 4, dtype=DOUBLE)
    torch.manual_seed(0)
    rbm.contrastive_divergence(data)
    first = rbm.weight.grad.clone()  # type: ignore[union-attr]
    torch.manual_seed(0)
    rbm.contrastive_divergence(data)
    assert torch.allclose(rbm.weight.grad, 2 * first) and rbm.visible_bias.grad is None  # type: ignore[arg-type]


def test_chains_are_of_no_saved_model() -> None:
    rbm = machine()
    rbm.begin_chains(5)
    assert set(rbm.state_dict()) == {"weight", "hidden_bias", "visible_bias"}


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: RBM(0, 3), "visible must be a whole number of at least 1, got 0"),
        (lambda: RBM(4, 3, units="gausian"), "units are 'bernoulli', 'gaussian' or 'softmax', got 'gausian'"),
        (lambda: RBM(5, 3, units="softmax", classes=2), "5 softmax units are no groups of classes=2"),
        (lambda: RBM(4, 3, units="softmax"), "units='softmax' needs classes="),
        (lambda: RBM(4, 30).log_partition(), "of at most 22, got 30"),
        (lambda: RBM(4, 3, units="gaussian").pseudo_likelihood(torch.ones(1, 4)), "is one of Bernoulli units"),
        (lambda: DBN([4]), "at least two sizes"),
    ],
)  # fmt: skip
def test_what_makes_no_machine_is_said(make: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()  # type: ignore[operator]
